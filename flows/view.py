"""Prefect is only a view: a run whose Prefect server does not answer goes on, unseen until it answers again."""

import asyncio
from typing import cast
from uuid import UUID

import httpx
from prefect import Task
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from milepost.flows.crashed import complete_unseen
from milepost.flows.iteration import iteration
from milepost.flows.outcome import watched
from milepost.flows.prefect_client import prefect_answers
from milepost.flows.progress import say
from milepost.flows.step_context import Position, Unshown
from milepost.storage.parameters import Parameters


def is_unreported(error: BaseException) -> bool:
    """Whether a request to the Prefect API failed, which says nothing about the work that was to be reported."""
    found = [error, error.__cause__]  # a client that cannot be opened gives an error of its own
    return isinstance(error, ObjectNotFound) or any(_is_from_api(cause) for cause in found)


def _is_from_api(error: BaseException | None) -> bool:
    if not isinstance(error, httpx.RequestError | httpx.HTTPStatusError):
        return False
    return str(error.request.url).startswith(str(PREFECT_API_URL.value()))


class View:
    """The steps of a run as Prefect shows them, for as long as it answers."""

    def __init__(self) -> None:
        self._shows = True
        self._results: list[object] = []
        self._place = Task(name=iteration.name, fn=iteration.fn).task_key  # under which Prefect counts subflows

    def keep(self, result: object) -> None:
        """Hold what a task or subflow gave: Prefect draws its edges by address, which no other object may get."""
        self._results.append(result)

    async def step(self, root: str, run: str, step: int, start: Position, parameters: Parameters) -> Position:
        """`iteration`, shown or not. What a step returned or raised counts, not whether Prefect could be told."""
        given = Unshown(parameters=parameters)
        with watched() as outcome:
            if await prefect_answers():
                await self._show(step)
                self._count_from(step)
                try:
                    return await iteration(root, run, step, start, given)
                except Exception as error:  # Prefect raises what the step raised, and beside it errors of its own
                    if not is_unreported(error):
                        raise
            self._hide(step)
            if outcome.error:
                raise outcome.error
            if outcome.done:
                return cast(Position, outcome.result)
            return await iteration.fn(root, run, step, start, given)

    def _count_from(self, step: int) -> None:
        """Give a step the place of its number: a process that goes on with a flow run would take those of the first."""
        if context := FlowRunContext.get():
            context.task_run_dynamic_keys[self._place] = step - 1

    async def _show(self, step: int) -> None:
        if not self._shows:
            await asyncio.to_thread(complete_unseen, UUID(flow_run.id))
            say(f"Prefect answers again and shows step {step}")
        self._shows = True

    def _hide(self, step: int) -> None:
        if self._shows:
            say(f"Prefect does not answer: the run goes on at step {step}, unseen")
        self._shows = False
