"""Continuous batching: one thread that owns a batch, and does between two tokens what other threads ask for.

A sequence never mixes weight versions, unless it was running when generation was paused `in_place`.
"""

import concurrent.futures
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from milepost.engines.embedded_batch import Batch
from milepost.engines.embedded_sequence import Sequence
from milepost.engines.protocols import PauseMode

Command = Callable[[], None]

SETTLE_SECONDS = 0.005  # a burst is over when nothing came for so long
GATHER_SECONDS = 0.1
ABORTED = "aborted on request"


class EngineFailed(RuntimeError):
    """The thread that generates has ended: what it was asked for will never be done."""


class Scheduler:
    """Runs a Batch. Methods may be called from any thread; all but `submit` and `abort` wait until they are obeyed."""

    def __init__(self, batch: Batch, *, version: str) -> None:
        self.version = version
        self.paused: PauseMode | None = None
        self._batch = batch
        self._released = False
        self._closing = False
        self._updates: deque[Command] = deque()
        self._inbox: queue.SimpleQueue[Sequence | Command] = queue.SimpleQueue()
        self._loop: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A daemon: the end of a process whose cluster is gone does not wait for it.
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()
        self._loop.add_done_callback(self._finish_all)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its callbacks tell the rest. One that nothing will run is finished as aborted."""
        self._inbox.put(sequence)
        if self._loop.done():
            self._finish_all(self._loop)

    def abort(self, wanted: Callable[[Sequence], bool]) -> None:
        """End, with what they have, the sequences that are `wanted`."""
        self._inbox.put(lambda: self._batch.abort(wanted, message=ABORTED, version=self.version))

    def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens. `retract` starts running sequences over later, `abort` ends all there are."""
        self._ask(partial(self._pause, mode))

    def resume(self) -> None:
        self._ask(partial(setattr, self, "paused", None))

    def update(self, apply: Command, version: str) -> None:
        """Change the weights: at once when paused, else when the running sequences have finished; new ones wait."""
        self._ask(partial(self._update, apply, version), via=self._updates.append)

    def set_memory(self, release: Command | None) -> None:
        """Stop and `release` memory, which starts running sequences over later; None lets them run again."""
        self._ask(partial(self._set_memory, release))

    def load(self) -> tuple[int, int]:
        """How many sequences run, and how many wait."""
        return len(self._batch.running), len(self._batch.waiting) + self._inbox.qsize()

    def failure(self) -> str:
        """Why nothing runs any more; empty while the thread runs."""
        if not self._loop.done():
            return ""
        error = self._loop.exception()
        return f"generation ended with {type(error).__name__}: {error}" if error else "the engine is closed"

    def close(self) -> None:
        """End the thread; sequences that were not finished are aborted."""
        self._inbox.put(partial(setattr, self, "_closing", True))
        self._thread.join()

    def _ask(self, command: Command, *, via: Callable[[Command], None] | None = None) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def obey() -> None:
            command()
            done.set_result(None)

        self._inbox.put(partial(via, obey) if via else obey)
        concurrent.futures.wait([done, self._loop], return_when=concurrent.futures.FIRST_COMPLETED)
        if not done.done():
            raise EngineFailed(self.failure())

    # From here on: the scheduler's thread only.

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._loop.set_exception(error)
        else:
            self._loop.set_result(None)

    def _run(self) -> None:
        while not self._closing:
            self._read_inbox(block=not self._active() and not self._may_update())
            self._gather()
            while self._may_update():
                self._updates.popleft()()
            if self._active():
                if not self._updates:
                    self._batch.admit(self.version)
                self._batch.step(self.version)

    def _active(self) -> bool:
        wanted = bool(self._batch.running) or (bool(self._batch.waiting) and not self._updates)
        return self.paused is None and not self._released and wanted

    def _may_update(self) -> bool:
        return bool(self._updates) and (self.paused is not None or not self._batch.running)

    def _read_inbox(self, *, block: bool) -> None:
        while block or not self._inbox.empty():
            self._take(self._inbox.get())
            block = False

    def _take(self, item: Sequence | Command) -> None:
        if isinstance(item, Sequence):
            self._batch.waiting.append(item)
        else:
            item()

    def _gather(self) -> None:
        """Wait a moment for the rest of a burst: a step costs nearly the same for a few rows as for many."""
        deadline = time.monotonic() + GATHER_SECONDS
        while self._active() and self._batch.may_double() and time.monotonic() < deadline:
            try:
                self._take(self._inbox.get(timeout=SETTLE_SECONDS))
            except queue.Empty:
                return

    def _pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode == "abort":
            self._batch.abort(lambda sequence: True, message=ABORTED, version=self.version)
        elif mode == "retract":
            self._batch.retract()

    def _update(self, apply: Command, version: str) -> None:
        apply()
        self.version = version

    def _set_memory(self, release: Command | None) -> None:
        self._released = release is not None
        if release is not None:
            self._batch.retract()
            release()

    def _finish_all(self, loop: concurrent.futures.Future[Any]) -> None:
        """Finish whatever is left, without the model: nobody waits for a thread that is gone."""
        left = [*self._batch.running, *self._batch.waiting]
        self._batch.running, self._batch.waiting = [], deque()
        while not self._inbox.empty():
            if isinstance(item := self._inbox.get(), Sequence):
                left.append(item)
        for sequence in left:
            sequence.version_first = sequence.version_first or self.version
            sequence.version_last = sequence.version_last or self.version
            sequence.finish("abort", message=self.failure())
            sequence.on_finish(sequence)
