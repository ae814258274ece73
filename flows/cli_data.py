"""Commands that make prompt sets, and stored runs of rollouts that were made elsewhere."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from milepost.flows.cli_options import FAULTY, AsJson, Overrides, Root, print_values
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

data_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make prompt sets, and import rollouts that were made elsewhere."
)


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


@data_app.command("check")
def check(
    path: Annotated[str, typer.Argument(help="Prompt set; PATH@[a:b] for a slice of its rows.")],
    against: Annotated[
        str, typer.Option(help="Prompt set, such as a held-out one, whose prompts should not be in it.")
    ] = "",
    reward: Annotated[str, typer.Option(help="Reward whose labels they are (default: the recipe's).")] = "",
    options: Annotated[str, typer.Option(help="The reward's options, as a JSON object.")] = "{}",
    model: Annotated[str, typer.Option(help="Model to count rendered tokens by; characters without one.")] = "",
    config: Annotated[str, typer.Option("--config", "-c", help="Recipe that says how the set is read.")] = "",
    set: Overrides = None,
    out: Annotated[str, typer.Option(help="File to write all that was found to, as JSON.")] = "",
    as_json: AsJson = False,
) -> None:
    """Rows, repetitions, labels and lengths of a prompt set, and what another set has of it.

    Exit code 3 when rows cannot be used or are in the other set.
    """
    from milepost.flows.data_check import check_data
    from milepost.flows.data_page import show
    from milepost.flows.plan import model_folder
    from milepost.flows.prompt_tokenizer import prompt_tokenizer
    from milepost.flows.recipe import load_recipe
    from milepost.flows.regrading import section
    from milepost.storage import files

    parameters, _ = load_recipe(config or None, set or [])
    parameters = parameters.resolved(going_on=True)
    model = model or parameters.model.path
    asked = section(reward or None, options, parameters.reward.timeout_seconds)
    found = check_data(
        parameters.data.model_copy(update={"path": path, "sets": []}),
        tokenizer=prompt_tokenizer(parameters, model_folder(model)) if model else None,
        reward=asked or (parameters.reward if config else None),
        against=against,
    )
    if out:
        files.publish_json(out, asdict(found), overwrite=True)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        show(found)
    if found.is_faulty:
        raise typer.Exit(FAULTY)


@data_app.command("import")
def import_(
    file: Annotated[str, typer.Argument(help="JSONL: messages, the last of them the answer; what export writes, too.")],
    run: Annotated[str, typer.Option("--run", help="Name of the run that it becomes.")],
    root: Root = None,
    tokenizer: Annotated[str, typer.Option(help="Model folder, GGUF file or package:NAME with the tokenizer.")] = "",
    config: Annotated[str, typer.Option("--config", "-c", help="Recipe whose model has the tokenizer.")] = "",
    set: Overrides = None,
    reward: Annotated[
        str | None, typer.Option(help="Score the samples by this reward (default: as in the file).")
    ] = None,
    options: Annotated[str, typer.Option(help="The reward's options, as a JSON object.")] = "{}",
    timeout: Annotated[float, typer.Option(help="Seconds that one sample may take to be scored.")] = 10.0,
    reward_key: Annotated[str, typer.Option(help="Key of a row's score.")] = "reward",
    groups_per_step: Annotated[
        int | None, typer.Option(help="Prompts a step (default: as the rows say, or 32).")
    ] = None,
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Take token ids that are not their text here, and count them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a stored run of rollouts: verify, sql, show, report, regrade and export work on it, and runs train on it."""
    import asyncio

    from milepost.flows.import_run import Import, import_run
    from milepost.flows.recipe import load_recipe
    from milepost.flows.regrading import section

    parameters, _ = load_recipe(config or None, set or [])
    wanted = Import(
        file=file,
        run=run,
        root=absolute_root(root or DEFAULT_ROOT),
        model=tokenizer or parameters.model.path,
        chat_template=parameters.data.apply_chat_template,
        context_length=parameters.model.context_length,
        reward=section(reward, options, timeout),
        reward_key=reward_key,
        groups_per_step=groups_per_step,
        allow_mismatch=allow_mismatch,
    )
    done = asdict(asyncio.run(import_run(wanted)))
    if as_json:
        print(json.dumps(done))
    else:
        print_values(done | done.pop("origin"), "imported")
