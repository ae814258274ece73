"""An ASGI application served by uvicorn in a thread, and a Ray actor that serves any application by its factory's name.

The socket is bound first and held, so a port that was announced is the port that answers.
"""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import uvicorn

from milepost.engines import cluster
from milepost.engines.observed import Observed
from milepost.storage.registry import load_dotted

import ray  # isort: skip  (after cluster, which sets how it authenticates)

READY_SECONDS = 60.0
STOP_SECONDS = 5.0
_ANY_ADDRESS = ("0.0.0.0", "::")


def server_config(app: Any, *, finish_seconds: int) -> uvicorn.Config:
    """How every application of ours is served; at its end requests in flight have `finish_seconds` to finish."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_config=None,  # what it logs goes where this process logs
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=300,  # longer than a client's pool keeps a connection, so that it closes first
        timeout_graceful_shutdown=finish_seconds,
    )


class HttpServer:
    """Serves `app` from construction until `stop`."""

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = bind(host, port)
        self._server = uvicorn.Server(server_config(app, finish_seconds=int(STOP_SECONDS)))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()
        self._wait_until_ready()
        port = self._socket.getsockname()[1]
        advertised = ray.util.get_node_ip_address() if host in _ANY_ADDRESS else host
        self.url = f"http://[{advertised}]:{port}" if ":" in advertised else f"http://{advertised}:{port}"

    def stop(self) -> None:
        """Finish the requests in flight, for a few seconds at most, and free the port."""
        self._server.should_exit = True
        self._thread.join(2 * STOP_SECONDS)
        self._socket.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._socket.close()
                raise RuntimeError("the application did not start: its lifespan failed or took too long")
            time.sleep(0.005)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on `host`; port 0 lets the system choose. Raises ValueError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(2048)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} on {host} is in use: choose another, or 0 for a free one") from None
        raise ValueError(f"cannot listen on {host}:{port} ({error.strerror or error}): choose another host") from None
    return server


class AppServer(Observed):
    """Ray actor: serves the ASGI application that `factory` ("pkg.mod:fn") builds from `kwargs`."""

    def __init__(self, factory: str, kwargs: dict[str, Any], host: str = "", port: int = 0) -> None:
        """Without a host it is reached where its cluster reaches it."""
        self._settings = (factory, kwargs, host, port)
        self._server: HttpServer | None = None

    def start(self) -> str:
        """Build and serve the application; its URL. Apart from the constructor, so that its error arrives as it was."""
        factory, kwargs, host, port = self._settings
        app = load_dotted(factory, group="application")(**kwargs)
        self._server = HttpServer(app, host=host or cluster.own_address(), port=port)
        return self._server.url

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("the application is not running")
        return self._server.url

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


class RunningApp:
    """The driver's side of an AppServer."""

    def __init__(self, handle: Any, url: str) -> None:
        self._handle = handle
        self._url = url

    def url(self) -> str:
        return self._url

    def close(self) -> None:
        """Let requests in flight end, then end the actor."""
        stop_serving_actor(self._handle)


def start_app(
    name: str,
    factory: str,
    kwargs: dict[str, Any],
    *,
    host: str = "",
    port: int = 0,
    timeout_seconds: float = 120.0,
) -> RunningApp:
    """Start an AppServer actor called `name` and wait until it answers."""
    handle = cluster.start_actor(AppServer, name, factory, kwargs, host, port)
    return RunningApp(handle, *start_serving({name: handle}, timeout_seconds=timeout_seconds))


def start_serving(actors: Mapping[str, Any], *, timeout_seconds: float) -> list[str]:
    """Have named actors `start` side by side; their URLs. When one does not, its error is raised and all are ended."""
    starting = {name: handle.start.remote() for name, handle in actors.items()}
    try:
        return [cluster.wait(ref, timeout_seconds, what=f"starting {name}") for name, ref in starting.items()]
    except BaseException:
        for handle in actors.values():
            cluster.kill(handle)
        raise


def stop_serving_actor(handle: Any) -> None:
    """Have an actor `stop`, which lets answers go out, and end it in any case."""
    with contextlib.suppress(cluster.EngineFailure):
        cluster.wait(handle.stop.remote(), 3 * STOP_SECONDS, what="stopping")
    cluster.kill(handle)
