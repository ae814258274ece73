"""The engines of one push: those that are still in it, asked all at once, and why the others are not."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from milepost.engines.weight_link import EngineLink, PushFailed

POLL_SECONDS = 0.001
GRACE_SECONDS = 2.0
IN_FLIGHT = 2  # one bucket is loaded while the next is on its way

Check = Callable[[], None]
Answers = Mapping[str, Future[Any]]


class Targets:
    """Engines by URL in `links`, reasons by URL in `failed`. One that fails is told to give up, and asked no more."""

    def __init__(self, urls: Sequence[str], seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.failed: dict[str, str] = {}
        self.links: dict[str, EngineLink] = {}
        self._pool = ThreadPoolExecutor(max(1, IN_FLIGHT * len(urls)), thread_name_prefix="push")
        found = {url: self._pool.submit(EngineLink, url, self.seconds_left) for url in urls}
        self.settle(found)
        self.links = {url: link.result() for url, link in found.items() if url not in self.failed}

    def seconds_left(self) -> float:
        """Until an engine that has not answered is late."""
        return self.deadline - time.monotonic()

    def each(self, ask: Callable[[EngineLink], object]) -> None:
        """Ask every engine, and drop those that fail."""
        self.settle(self.start(ask))

    def start(self, ask: Callable[[EngineLink], object]) -> Answers:
        """Ask every engine, whose answers are settled later. Up to `IN_FLIGHT` questions may be open."""
        return {url: self._pool.submit(ask, link) for url, link in self.links.items()}

    def settle(self, answers: Answers) -> None:
        """Wait for all answers, and drop those that failed. The rest do not pay for the time a silent engine took."""
        failed = len(self.failed)
        for url, answer in answers.items():
            try:
                answer.result()
            except PushFailed as error:
                self._drop(url, str(error))
        if len(self.failed) > failed and self.seconds_left() <= 0:
            self.deadline = time.monotonic() + self.seconds

    def start_together(self, what: str, ask: Callable[[EngineLink], object], do: Callable[[Check], None]) -> Answers:
        """Ask every engine for `what` and meanwhile `do` what all take part in: when one fails, so do the others.

        `do` calls the check that it is given while it waits, which raises when an engine has failed or time is up.
        """
        answers = self.start(ask)
        try:
            do(lambda: self._check(what, answers))
        except RuntimeError as error:  # PushFailed, or torch's word for a group that lost a member
            self._drop_all(answers, error)
            return {}
        return answers

    def settle_together(self, what: str, answers: Answers) -> None:
        """Wait for answers of `start_together`: when one failed, so did the others."""
        try:
            while not all(answer.done() for answer in answers.values()):
                self._check(what, answers)
                time.sleep(POLL_SECONDS)
            self._check(what, answers)
        except PushFailed as error:
            self._drop_all(answers, error)

    def close(self) -> None:
        """Wait for engines that give up: the next push is not to meet what is left of this one."""
        self._pool.shutdown()

    def _check(self, what: str, answers: Answers) -> None:
        for answer in answers.values():
            if answer.done():
                answer.result()
        if self.seconds_left() <= 0:
            silent = [url for url, answer in answers.items() if not answer.done()]
            raise PushFailed(f"no answer to {what} within {self.seconds:g} s from {', '.join(silent)}")

    def _drop_all(self, answers: Answers, cause: Exception) -> None:
        """An engine's own word on what happened is worth more than that of the group that broke over it."""
        until = time.monotonic() + GRACE_SECONDS
        while (
            not isinstance(cause, PushFailed) and not any(map(_reason, answers.values())) and time.monotonic() < until
        ):
            time.sleep(POLL_SECONDS)
        own = {url: reason for url, answer in answers.items() if (reason := _reason(answer))}
        first = next(iter(own.values()), str(cause))
        for url in answers:
            self._drop(url, own.get(url, f"the broadcast to {url} was given up: {first}"))

    def _drop(self, url: str, reason: str) -> None:
        """The first reason counts: what was in flight with it fails over it."""
        self.failed.setdefault(url, reason)
        link = self.links.pop(url, None)
        if link is not None:
            self._pool.submit(link.give_up)


def _reason(answer: Future[Any]) -> str:
    error = answer.exception() if answer.done() else None
    return str(error) if error is not None else ""
