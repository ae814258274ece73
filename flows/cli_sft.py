"""The command `sft`."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.flows.cli_options import AsJson, Overrides, Root, print_done
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

sft_app = typer.Typer(rich_markup_mode=None)


@sft_app.command()
def sft(
    model: Annotated[str, typer.Option(help="Model folder, GGUF file or package:NAME to begin with.")],
    data: Annotated[str, typer.Option(help="Rows of messages, or of prompt and response: .jsonl or .parquet.")],
    run: Annotated[str | None, typer.Option("--run", help="Name of what is made, a folder in root.")] = None,
    root: Root = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps (default: as --epochs take).")] = None,
    epochs: Annotated[float | None, typer.Option(help="How often every row is learnt (default: once).")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows an optimizer step (default: 32).")] = None,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Supervised fine-tuning: teach a model answers that are there; only the assistant's tokens are trained."""
    from milepost.flows.launch_sft import launch_sft

    stem = Path(data.partition("@[")[0]).name.partition(".")[0] or "rows"
    given: dict[str, Any] = {"path": data, "batch_size": batch_size}
    found = launch_sft(
        run if run is not None else f"sft-{stem}-{datetime.now():%Y%m%d-%H%M%S}",
        absolute_root(root or DEFAULT_ROOT),
        model=model,
        data={name: value for name, value in given.items() if value is not None},
        overrides=set or [],
        steps=steps,
        epochs=epochs,
    )
    print_done(found if as_json else {name: value for name, value in found.items() if name != "losses"}, as_json)
