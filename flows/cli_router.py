"""`milepost router`: one URL in front of SGLang servers, outside any run."""

import logging
import os
import sys
from typing import Annotated

import typer

router_app = typer.Typer()

TOKEN = "MILEPOST_ROUTER_TOKEN"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@router_app.command()
def router(
    worker: Annotated[list[str] | None, typer.Option(help="URL of an SGLang server; more can be added later.")] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="least_loaded, least_tokens, round_robin, power_of_two, consistent_hash, sticky, cache_aware, or "
            "pkg.mod:Class."
        ),
    ] = "least_loaded",
    host: Annotated[str, typer.Option(help=f"Address to listen on; beyond this machine only with {TOKEN}.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.")] = 30000,
    max_in_flight: Annotated[int, typer.Option(help="Requests at each worker at once; 0 for any number.")] = 0,
    queue_seconds: Annotated[float, typer.Option(help="Longest wait for a place at a worker.")] = 60.0,
    request_seconds: Annotated[float, typer.Option(help="Deadline of a request.")] = 600.0,
    resends: Annotated[int, typer.Option(help="Times that a request may go to another worker.")] = 2,
    guard_data: Annotated[bool, typer.Option("--guard-data", help="Generating needs the token too.")] = False,
    drain_seconds: Annotated[int, typer.Option(help="On Ctrl-C, longest wait for what is in flight.")] = 60,
    access_log: Annotated[bool, typer.Option(help="A line of JSON on stdout for each request.")] = True,
) -> None:
    """Serve until Ctrl-C. With MILEPOST_ROUTER_TOKEN set, workers and weights may be changed only by who knows it."""
    from milepost.engines.app_server import bind, server_config
    from milepost.router.app import build_app

    token = os.environ.get(TOKEN) or None
    if host not in _LOOPBACK and token is None:
        raise ValueError(f"--host {host} lets others in, who could add workers: set {TOKEN} to a secret first")
    if guard_data and token is None:
        raise ValueError(f"--guard-data needs a token: set {TOKEN} to a secret first")
    app = build_app(
        worker or [],
        policy=policy,
        token=token,
        guards_data=guard_data,
        max_in_flight=max_in_flight,
        queue_seconds=queue_seconds,
        request_timeout_seconds=request_seconds,
        resends=resends,
    )
    socket = bind(host, port)
    _log(access_log)
    shown = f"[{host}]" if ":" in host else host
    print(
        f"router at http://{shown}:{socket.getsockname()[1]}, policy {policy}, {len(worker or [])} workers", flush=True
    )

    import uvicorn

    uvicorn.Server(server_config(app, finish_seconds=drain_seconds)).run(sockets=[socket])


def _log(access_log: bool) -> None:
    """Requests to stdout, a line of JSON each; what becomes of workers to stderr."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
    access = logging.getLogger("milepost.router.access_log")
    access.propagate = False
    access.addHandler(logging.StreamHandler(sys.stdout))
    access.setLevel(logging.DEBUG if access_log else logging.WARNING)
