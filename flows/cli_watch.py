"""Commands that watch runs: how they stand, and what their processes say."""

import json
import time
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from milepost.flows.cli_options import AsJson, Root
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

REFRESH_SECONDS = 2.0

watch_app = typer.Typer(rich_markup_mode=None)


@watch_app.command()
def status(
    run: Annotated[str | None, typer.Argument(help="Name of a run to see in detail (default: all runs).")] = None,
    root: Root = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until interrupted, or the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """How all runs stand, or one of them: state, steps, reward, accuracy, last steps, and where things are."""
    if watch and as_json:
        raise ValueError("--watch is for people and --json for programs: give one of them")
    place = absolute_root(root or DEFAULT_ROOT)
    if as_json:
        print(json.dumps(_values(run, place)))
        return
    from milepost.flows.status_view import terminal

    console = terminal()
    view, goes_on = _view(run, place, console.width)
    if not watch:
        console.print(view)
        return
    with Live(view, console=console, auto_refresh=False) as live:
        while goes_on:
            time.sleep(REFRESH_SECONDS)
            view, goes_on = _view(run, place, console.width)
            live.update(view, refresh=True)


def _values(run: str | None, root: str) -> dict[str, object]:
    from dataclasses import asdict

    from milepost.flows.run_detail import run_detail
    from milepost.flows.run_status import all_statuses
    from milepost.storage import runs

    if run is not None:
        return run_detail(runs.run_folder(root, run), root).as_json()
    return {"runs": [asdict(found) | {"eta_seconds": found.eta_seconds} for found in all_statuses(root)]}


def _view(run: str | None, root: str, width: int) -> tuple[RenderableType, bool]:
    """What to show, and whether it will change."""
    from milepost.flows.run_detail import run_detail
    from milepost.flows.run_status import AT_WORK, all_statuses
    from milepost.flows.status_view import detail_view, status_table
    from milepost.storage import runs

    if run is not None:
        found = run_detail(runs.run_folder(root, run), root)
        return detail_view(found, width), found.status.state in AT_WORK
    statuses = all_statuses(root)
    return status_table(statuses, width) if statuses else f"no run in {root} yet: `milepost train` starts one", True


@watch_app.command()
def logs(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    root: Root = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    process: Annotated[str, typer.Option(help="Of one process only, such as train-0, rollout-0 or router.")] = "",
    level: Annotated[str, typer.Option(help="From which level on: debug, info, warning or error.")] = "info",
) -> None:
    """What all processes of a run have said, in order of time."""
    from milepost.flows.log_view import chosen, show
    from milepost.storage import runs

    folder = runs.run_folder(absolute_root(root or DEFAULT_ROOT), run)
    show(chosen(folder, process=process, level=level, follow=follow))
