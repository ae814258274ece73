"""Commands that make prompt sets."""

from typing import Annotated

import typer

from milepost.flows.cli_options import print_values

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make prompt sets.")


@data_app.command("reasoning-gym")
def reasoning_gym(
    task: Annotated[str, typer.Option(help="Task of reasoning-gym, such as chain_sum.")],
    out: Annotated[str, typer.Option(help="File to write: .parquet or .jsonl.")],
    size: Annotated[int, typer.Option(help="Prompts.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the task's generator; seeds side by side share problems.")] = 0,
    without: Annotated[str, typer.Option(help="Prompt set whose problems are left out, to hold others out.")] = "",
    shots: Annotated[int, typer.Option(help="Solved problems that come before each.")] = 0,
    text: Annotated[bool, typer.Option(help="Strings, for data.apply_chat_template=false, not messages.")] = False,
    option: Annotated[list[str] | None, typer.Option(help="Of the task, such as max_terms=2; repeatable.")] = None,
) -> None:
    """Prompts of a reasoning-gym task, with what its verifier needs."""
    from milepost.flows.gym_data import make_reasoning_gym
    from milepost.flows.recipe import json_or_text

    pairs = [word.partition("=") for word in option or []]
    config = {name: json_or_text(value) for name, _, value in pairs}
    made = make_reasoning_gym(task, size, seed, out, shots=shots, text=text, without=without, **config)
    print_values(vars(made), "written")


@data_app.command("arithmetic")
def arithmetic(
    out: Annotated[str, typer.Option(help="File to write: .parquet or .jsonl.")],
    size: Annotated[int, typer.Option(help="Prompts.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the choice and the order.")] = 0,
    split: Annotated[str, typer.Option(help="train or held_out: no problem is in both.")] = "train",
    digits: Annotated[int, typer.Option(help="Digits of the operands.")] = 2,
    operators: Annotated[str, typer.Option(help="Some of + - *.")] = "+-*",
) -> None:
    """Arithmetic problems such as 12+7=, with answers as labels."""
    from milepost.flows.data import make_arithmetic, split_of

    print_values(
        vars(make_arithmetic(size, seed, out=out, split=split_of(split), digits=digits, operators=operators)), "written"
    )
