"""What the processes of a run log, in files and on the page of its flow run.

Each process writes a file of its own (`storage/process_logs.py`). A thread of the flow's process reads them all and
hands Prefect what matters; nothing waits for it, and what it has not sent is in the files all the same.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect.exceptions import Pause

from milepost.engines.actor_logs import logs_in
from milepost.flows.failure import sentence
from milepost.flows.outcome import signal_in, unheard
from milepost.flows.polling import polled
from milepost.storage.process_logs import SAID, STOPS, Entry, Tail, log_handler
from milepost.storage.runs import RunFolder

POLL_SECONDS = 1.0
OWN = "flow"


@contextmanager
def logged(folder: RunFolder, flow_run_id: str) -> Iterator[None]:
    """Inside, this process and the actors that it starts log into the workspace of the run, and Prefect is told."""
    with ExitStack() as stack:
        stack.enter_context(logs_in(folder.logs))
        tail = Tail(folder.logs)
        tail.skip()
        stack.enter_context(_own_log(str(Path(folder.logs, f"{OWN}.log"))))
        if flow_run_id:
            stack.enter_context(polled(lambda: _forward(tail, flow_run_id), POLL_SECONDS))
        try:
            yield
        except BaseException as error:  # also Ctrl-C and a cancellation; whoever started the run tells people
            reason = signal_in(error) or unheard(error) or error
            if isinstance(reason, Exception):
                SAID.error("%s%s", STOPS, sentence(reason))
            else:
                SAID.info("%sit was %s", STOPS, "suspended" if isinstance(reason, Pause) else "told to")
            raise


@contextmanager
def _own_log(path: str) -> Iterator[None]:
    """What Milepost logs in this process goes to `path` as well."""
    logger, handler = logging.getLogger("milepost"), log_handler(path)
    before = logger.level
    logger.setLevel(logging.INFO)
    SAID.propagate = False  # it is on the terminal already
    for one in (logger, SAID):
        one.addHandler(handler)
    try:
        yield
    finally:
        for one in (logger, SAID):
            one.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


def is_told(entry: Entry) -> bool:
    """What Milepost says, but for details, and what is wrong: an SGLang server talks all the time."""
    least = logging.INFO if entry.logger.startswith("milepost") else logging.WARNING
    return entry.level >= least


def _forward(tail: Tail, flow_run_id: str) -> None:
    """Queue new records for Prefect's own thread, each with its time and under the name of its process."""
    logger = logging.getLogger("prefect.flow_runs")
    for entry in filter(is_told, tail.read()):
        record = logging.LogRecord(entry.process, entry.level, "", 0, entry.message, None, None)
        record.created, record.flow_run_id = entry.time, flow_run_id
        logger.handle(record)
