"""`milepost deploy`: what the pages of a Prefect server offer to run, and the worker that runs it."""

from typing import Annotated

import typer

from milepost.flows.cli_options import Root
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

deploy_app = typer.Typer(rich_markup_mode=None)

DEFAULT_RECIPES = ["smollm2-chain-sum"]


@deploy_app.command()
def deploy(
    pool: Annotated[str, typer.Option(help="Work pool, made when it is not there.")] = "milepost",
    root: Root = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipe whose form is filled in, a file or a shipped one; repeatable.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Flow runs at a time (default: 8, or as it was).")] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="GPUs, or cores, that runs take turns by (default: all, or as it was).")
    ] = None,
    evaluate_saved: Annotated[
        bool | None,
        typer.Option(
            "--evaluate-saved/--no-evaluate-saved",
            help="Evaluate every checkpoint that a run with an eval section saves (default: as it was, at first no).",
        ),
    ] = None,
    evaluate_every: Annotated[
        str, typer.Option(help="Evaluate new checkpoints on a schedule, as in '0 */6 * * *', in UTC.")
    ] = "",
    alert_webhook: Annotated[
        str, typer.Option(help="Address that alerts are posted to, or env:NAME of it; kept as a secret by the server.")
    ] = "",
    worker: Annotated[bool, typer.Option(help="Run what is asked for until Ctrl-C; what runs then is stopped.")] = True,
) -> None:
    """Offer train, resume, replay and the rest on the pages of the Prefect server, and run what is asked for there.

    Paths in forms start from the current directory.
    """
    from milepost.flows.automations import cron_schedule, webhook_url
    from milepost.flows.deploy import Wishes
    from milepost.flows.deploy import deploy as register
    from milepost.flows.progress import say
    from milepost.flows.services import prefect_api
    from milepost.flows.worker import work

    wishes = Wishes(
        evaluate_saved,
        cron_schedule(evaluate_every) if evaluate_every else None,
        webhook_url(alert_webhook) if alert_webhook else "",
    )
    place, recipes = absolute_root(root or DEFAULT_ROOT), recipe or DEFAULT_RECIPES
    with prefect_api(own=False) as url:
        made = register(pool, place, recipes, runs=runs, slots=slots, wishes=wishes)
    for name, id in made.items():
        print(f"{name:28} {url.removesuffix('/api')}/deployments/deployment/{id}/run")
    if worker:
        code = work(pool, url)
        if code:
            again = "the runs that it had end by themselves and can be resumed, call `milepost deploy` again"
            say(f"the worker of pool {pool!r} has ended with code {code}: {again}")
        raise typer.Exit(abs(code))
    print(f"a worker of pool {pool!r} runs it: `milepost deploy --pool {pool}` starts one where there is none")
