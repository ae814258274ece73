"""The command `convert`."""

from typing import Annotated

import typer

from milepost.flows.cli_options import AsJson, Root, print_done
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

convert_app = typer.Typer(rich_markup_mode=None)


@convert_app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="RUN@STEP, RUN@latest, RUN@best, a checkpoint, or a model folder of either format.")
    ],
    out: Annotated[str, typer.Argument(help="The new folder.")],
    to: Annotated[str, typer.Option(help="hf for a Hugging Face folder, megatron for Megatron's torch_dist.")] = "hf",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 (default: as it is stored).")] = "",
    like: Annotated[str, typer.Option(help="Hugging Face model of weights that Megatron-LM has saved.")] = "",
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Convert a model or a checkpoint. Megatron's format has pickles in it: convert what you trust."""
    from milepost.flows.convert import convert_model

    folder = absolute_root(root or DEFAULT_ROOT)
    print_done(convert_model(source, out, folder, form=to, dtype=dtype, like=like), as_json)
