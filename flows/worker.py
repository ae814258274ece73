"""The process that starts flow runs which the pages of a Prefect server ask for."""

import os
import signal
import socket
import subprocess
import sys

import psutil

from milepost.engines.death_signal import death_signal
from milepost.flows.prefect_client import client_environment

QUERY_SECONDS = 2  # how often a worker asks for work
GRACE_SECONDS = 30.0


def work(pool: str, url: str) -> int:
    """Start what is asked for in `pool` until the worker ends, whose code this returns, or this process is to end.

    The flow runs that are going on then are ended in good order, which the worker itself would not do.
    """
    own = {"PREFECT_API_URL": url, "PREFECT_WORKER_QUERY_SECONDS": str(QUERY_SECONDS)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which ends a worker; background jobs ignore it
    process = subprocess.Popen(
        _command(pool),
        env={**os.environ, **client_environment(), **own},
        start_new_session=True,  # Ctrl-C is for this process
        preexec_fn=death_signal() if sys.platform == "linux" else None,
    )
    try:
        return process.wait()
    finally:
        _end(process)


def _command(pool: str) -> list[str]:
    name = f"{socket.gethostname()}-{os.getpid()}"
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name]


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    flow_runs = psutil.Process(process.pid).children()
    for flow_run in flow_runs:
        flow_run.terminate()
    psutil.wait_procs(flow_runs, timeout=GRACE_SECONDS)
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
