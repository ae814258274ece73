"""How flows in this process speak to Prefect: where it is, how long they wait for it, and what they say of it."""

import asyncio
import contextlib
import logging
import os
import queue
from collections.abc import Iterator

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker, PrefectConsoleHandler
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from milepost.flows import service_state

DRAIN_SECONDS = 10.0
RETRIES = 2  # of a request, 2 and 4 s apart: a run goes on without Prefect, and should soon
REQUEST_SECONDS = 15.0
BRIEF_SECONDS = 5.0
ANSWER_SECONDS = 2.0


def client_environment() -> dict[str, str]:
    """The patience with Prefect that flows of other processes have, as they read it from their environment."""
    return {
        PREFECT_CLIENT_MAX_RETRIES.name: str(RETRIES),
        PREFECT_API_REQUEST_TIMEOUT.name: str(REQUEST_SECONDS),
    }


@contextlib.contextmanager
def brief_client() -> Iterator[SyncPrefectClient]:
    """A client that asks once and does not wait long, for what is done beside a run."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        with get_client(httpx_settings={"timeout": BRIEF_SECONDS}, sync_client=True) as client:
            yield client


async def prefect_answers() -> bool:
    url = f"{PREFECT_API_URL.value()}/health"
    return await asyncio.to_thread(service_state.answers, url, timeout_seconds=ANSWER_SECONDS)


@contextlib.contextmanager
def prefect_client(url: str, console_level: str, *, drain: bool) -> Iterator[None]:
    """Point Prefect in this process, and in those it starts, at `url`; with `drain`, send everything before leaving."""
    before = os.environ.get("PREFECT_API_URL")
    consoles = [handler for handler in logging.getLogger().handlers if isinstance(handler, PrefectConsoleHandler)]
    consoles += logging.getLogger("prefect._internal").handlers
    levels = [handler.level for handler in consoles]
    raises, logging.raiseExceptions = logging.raiseExceptions, False  # a log that cannot be sent is no news here
    os.environ["PREFECT_API_URL"] = url
    for handler in consoles:
        handler.setLevel(console_level)
    try:
        with temporary_settings(
            {
                PREFECT_API_URL: url,
                PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
                PREFECT_CLIENT_MAX_RETRIES: RETRIES,
                PREFECT_API_REQUEST_TIMEOUT: REQUEST_SECONDS,
            }
        ):
            try:
                yield
            finally:
                answered = service_state.answers(f"{url}/health")
                if not answered:
                    _drop_unsent()
                if drain or not answered:
                    _drain()
    finally:
        logging.raiseExceptions = raises
        for handler, level in zip(consoles, levels, strict=True):
            handler.setLevel(level)
        if before is None:
            os.environ.pop("PREFECT_API_URL", None)
        else:
            os.environ["PREFECT_API_URL"] = before


def _drop_unsent() -> None:
    """Without this, Prefect tries to send what waits before the process may end: 7 s an event, thousands of them."""
    for service in list(EventsWorker._instances.values()):  # those of every class
        with contextlib.suppress(queue.Empty):
            while True:
                service._queue.get_nowait()


def _drain() -> None:
    """Wait until Prefect's background threads have sent their logs and events."""
    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=DRAIN_SECONDS)
