"""A run as it goes: a live bar on a terminal, one plain line a step elsewhere. Always on stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from milepost.flows.failure import GONE, RunFailed
from milepost.storage.process_logs import SAID

LINE_SECONDS = 1.0


def say(text: str) -> None:
    """One line for a person, and for the log of the run if there is one; stdout is left to results."""
    _tell(text)
    SAID.info(text)


def _tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:  # a worker or terminal that was killed
        raise RunFailed(GONE) from None


class Advance(Protocol):
    """Called once a finished step with what to show of it."""

    def __call__(self, text: str) -> None: ...


def step_text(metrics: dict[str, float], seconds: float) -> str:
    """Reward, response length and generation speed of a step, in one short line."""
    reward = metrics.get("rollout/reward")
    shown = "reward  n/a" if reward is None else f"reward {reward:5.3f}"
    speed = metrics.get("rollout/tokens", 0.0) / max(seconds, 1e-9)
    return f"{shown}  {metrics.get('rollout/response_len/mean', 0):5.1f} tokens  {speed:6.0f} tokens/s"


@contextmanager
def progress_bar(title: str, total: int, *, begin: int = 0) -> Iterator[Advance]:
    """A bar over `total` steps, `begin` of which are done; the caller advances it. The log of a run has every step."""
    console, done = Console(stderr=True), begin

    def noted(show: Advance) -> Advance:
        def advance(text: str) -> None:
            nonlocal done
            done += 1
            SAID.info("%d of %d steps, %s", done, total, text)
            show(text)

        return advance

    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(title, total=total, completed=begin, shown="")
            yield noted(lambda text: bar.update(task, advance=1, shown=text))
    else:
        yield noted(_plain_lines(title, total, begin))


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
        transient=False,
    )


def _plain_lines(title: str, total: int, begin: int) -> Advance:
    """At most one line every `LINE_SECONDS`, and always the last."""
    begun, done, said = time.monotonic(), begin, 0.0

    def advance(text: str) -> None:
        nonlocal done, said
        done += 1
        elapsed = time.monotonic() - begun
        if done < total and elapsed - said < LINE_SECONDS:
            return
        said = elapsed
        eta = elapsed / (done - begin) * (total - done)
        _tell(f"{title} {done}/{total}  {text}  {elapsed:.0f} s, eta {eta:.0f} s")

    return advance
