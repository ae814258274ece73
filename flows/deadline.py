"""How long a stage may take, and what every process was doing when it took longer."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

from prefect import Task
from prefect.logging import get_run_logger
from prefect.task_engine import TaskRunTimeoutError

from milepost.engines.cluster import EngineTimeout
from milepost.engines.fleet import stacks
from milepost.flows.failure import first_cause
from milepost.flows.start import Launched
from milepost.storage import files, manifest
from milepost.storage.parameters import EnginesSection
from milepost.storage.runs import RunFolder

SHORTEST_SECONDS = 1800.0
HISTORY_STEPS = 10

P = ParamSpec("P")


def longest_stages(folder: RunFolder, step: int) -> dict[str, float]:
    """The longest that each stage took in the last `HISTORY_STEPS` steps before `step`, in seconds."""
    longest: dict[str, float] = {}
    for before in range(max(0, step - HISTORY_STEPS), step):
        for name, seconds in manifest.load(folder, before).metrics.items():
            if name.startswith("time/"):
                stage = name.removeprefix("time/")
                longest[stage] = max(longest.get(stage, 0.0), seconds)
    return longest


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of one step. `longest` is how many seconds each stage took at most in the steps before.

    `reasons` are results of tasks that a stage follows without reading them: Prefect shows an edge for each. `results`
    are kept while the step lasts: Prefect knows them by their addresses, and one that is free is soon another object's.
    """

    engines: EnginesSection
    longest: dict[str, float]
    reasons: tuple[Any, ...] = ()
    results: list[Any] = field(default_factory=list)

    def after(self, *reasons: Any) -> "Deadlines":
        return replace(self, reasons=reasons)

    def seconds(self, stage: str) -> float:
        """As configured, or a multiple of the longest that the stage took before."""
        multiple = self.engines.stage_timeout_factor * self.longest.get(stage, 0.0)
        return self.engines.stage_timeout_seconds or max(SHORTEST_SECONDS, multiple)

    async def run(self, task: Task[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """The task's result; when it is late, its run is shown as timed out and EngineTimeout is raised."""
        stage = task.name.split("_")[0]
        seconds = self.seconds(stage)
        try:
            timed: Any = task.with_options(timeout_seconds=seconds)
            result = timed(*args, **kwargs, wait_for=self.reasons or None)
            result = await result if inspect.isawaitable(result) else result
            self.results.append(result)
            return result
        except TaskRunTimeoutError:
            raise EngineTimeout(
                f"stage {stage} did not finish within {seconds:g} s: "
                "raise engines.stage_timeout_seconds if it was only slow"
            ) from None


@asynccontextmanager
async def stacks_kept(launched: Launched) -> AsyncIterator[None]:
    """When something inside takes too long, every process's stacks go to the log and to a file that the error names."""
    try:
        yield
    except Exception as error:  # it may be inside a group of failures; it is raised on in any case
        cause = first_cause(error)
        if not isinstance(cause, EngineTimeout):
            raise
        found = await asyncio.to_thread(stacks, launched.folder.run_id, launched.parameters)
        text = "\n".join(f"=== {name}\n{stack}" for name, stack in found.items())
        uri = files.join(launched.folder.uri, "stacks", f"{len(manifest.finished_steps(launched.folder)):06d}.txt")
        files.publish(uri, text.encode(), overwrite=True)
        get_run_logger().error("%s\n%s", cause, text)
        raise EngineTimeout(f"{cause}; what every process was doing is in {uri}") from error
