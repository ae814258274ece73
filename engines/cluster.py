"""Ray, held at arm's length: connecting to it, naming actors, and waiting for them without losing signals.

A wait polls a future, because `ray.get` swallows SIGTERM; connecting puts the process's signal handlers back, because
`ray.init` replaces them.
"""

import asyncio
import concurrent.futures
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# Ray listens on every interface, so its token is its lock; it reads the mode while it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray

from milepost.engines.actor_logs import log_path

NAMESPACE = "milepost"
LOOPBACK = "127.0.0.1"
CONTROL = "control"  # the concurrency group of methods that answer while an actor works
POLL_SECONDS = 0.2
STACK_SECONDS = 5.0
NAME_SECONDS = 15.0
OBJECT_STORE_BYTES = 256 * 1024 * 1024

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class EngineFailure(RuntimeError):
    """An engine is of no more use: its process ended, or it does not answer."""


class EngineTimeout(EngineFailure):
    """An engine did not answer inside its deadline."""


class EngineDied(EngineFailure):
    """The process of an engine ended."""


class EngineNameTaken(RuntimeError):
    """Another engine has the name."""


class EngineMissing(EngineFailure, LookupError):
    """No engine of that name is running."""


def connect(address: str | None = None, *, num_cpus: int | None = None) -> None:
    """Join the Ray cluster at `address`, or start one that ends with this process; once joined, this does nothing."""
    if ray.is_initialized():
        return
    # "local" starts a cluster of this process's own even where somebody else's runs.
    own: dict[str, Any] = {} if address else {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
    with _own_handlers():
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            **own,
        )


@contextmanager
def _own_handlers() -> Iterator[None]:
    """This process's signal handlers afterwards, for the signals that came meanwhile too.

    Ray's handler raises wherever it is called, which may be where exceptions are dropped: the signal would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    told, tell = socket.socketpair()
    with told, tell:
        tell.setblocking(False)
        before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for number in _received(told):
                signal.raise_signal(number)


def _received(told: socket.socket) -> list[int]:
    """The signals that the interpreter has written to the other end."""
    told.setblocking(False)
    try:
        return [number for number in told.recv(4096) if number in _SIGNALS]
    except BlockingIOError:
        return []


def is_connected() -> bool:
    return bool(ray.is_initialized())


def gpus() -> float:
    """GPUs of the cluster."""
    return float(ray.cluster_resources().get("GPU", 0))


def given_gpus() -> list[Any]:
    """The GPUs that the cluster gave this process; none outside of one."""
    return list(ray.get_gpu_ids()) if is_connected() else []


def own_address() -> str:
    """The address that the cluster reaches this process at: loopback unless Ray has several nodes."""
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return LOOPBACK
    return str(ray.util.get_node_ip_address())


def disconnect() -> None:
    """Leave the cluster; one that this process started ends, with its actors."""
    if ray.is_initialized():
        ray.shutdown()


def start_actor(
    actor_class: Any,
    name: str,
    *args: Any,
    num_cpus: float = 0,
    num_gpus: float = 0,
    resources: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A new actor called `name`, owned by this process, with `abort` and `health` callable while it works.

    `resources` are more of Ray's options, such as where the actor is placed.

    Two runs never share an actor: a name that is still taken after `NAME_SECONDS`, which Ray needs to notice that an
    actor died, is EngineNameTaken.
    """
    remote = ray.remote(
        num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, max_concurrency=1, concurrency_groups={CONTROL: 2}
    )(actor_class)
    named = remote.options(name=name, namespace=NAMESPACE, **(resources or {}))
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            handle = named.remote(*args, **kwargs)
            if path := log_path(name):
                handle.log_to.remote(path)  # before it is asked for anything else
            return handle
        except ray.exceptions.ActorAlreadyExistsError:
            if time.monotonic() > deadline:
                raise EngineNameTaken(f"an engine called {name!r} is running already: stop that run first") from None
            time.sleep(POLL_SECONDS)


def actor(name: str) -> Any:
    """The running actor called `name`; LookupError when there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise EngineMissing(f"no engine called {name!r} is running: start the run again") from None


def wait(ref: Any, timeout_seconds: float, *, what: str) -> Any:
    """The value behind `ref`, or EngineTimeout that says `what` was waited for; the actor's own errors pass through."""
    future = ref.future()
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            with _own_errors(what):
                return future.result(timeout=POLL_SECONDS)
        except concurrent.futures.TimeoutError:
            if time.monotonic() > deadline:
                raise _late(what, timeout_seconds) from None


async def answer(ref: Any, timeout_seconds: float, *, what: str) -> Any:
    """`wait` for a caller on an event loop."""
    future = asyncio.wrap_future(ref.future())
    done, _ = await asyncio.wait([future], timeout=timeout_seconds)
    if not done:
        raise _late(what, timeout_seconds)
    with _own_errors(what):
        return future.result()


def _late(what: str, timeout_seconds: float) -> EngineTimeout:
    return EngineTimeout(f"{what} did not finish within {timeout_seconds:g} s")


@contextmanager
def _own_errors(what: str) -> Iterator[None]:
    """An actor's own error as it was raised there, and EngineDied in place of Ray's word for it."""
    try:
        yield
    except ray.exceptions.RayActorError as error:
        raise EngineDied(f"the process that was asked for {what} ended: start the engines again") from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from None


def stacks_here() -> str:
    """What every thread of this process is doing now, as tracebacks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def stacks_of(names: Sequence[str]) -> dict[str, str]:
    """The stacks of the actors called `names`, which have a method `stack`; the reason for one that cannot tell."""
    asked: dict[str, Any] = {}
    found: dict[str, str] = {}
    for name in names:
        try:
            asked[name] = actor(name).stack.remote()
        except EngineMissing as error:
            found[name] = str(error)
    deadline = time.monotonic() + STACK_SECONDS
    for name, ref in asked.items():
        try:
            found[name] = str(wait(ref, max(0.0, deadline - time.monotonic()), what=f"the stack of {name}"))
        except EngineFailure as error:
            found[name] = f"{error}; it is stopped, dead, or in native code that holds the interpreter"
    return found


def kill(handle: Any) -> None:
    """End an actor at once, whatever it is doing."""
    ray.kill(handle, no_restart=True)
