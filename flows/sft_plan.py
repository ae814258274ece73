"""What a supervised fine-tuning would be, worked out and checked without starting anything."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milepost.engines.model_layout import check_layout
from milepost.engines.schedule import check_schedule
from milepost.engines.tokenizer import Learnable, Tokenizer, load_tokenizer
from milepost.flows.engine_checks import check_gpus
from milepost.flows.fine_tune import Example, SftPlan
from milepost.flows.plan import check_context, model_folder
from milepost.flows.recipe import absolute_root
from milepost.flows.trainer_alone import without_rollout
from milepost.storage import files, redaction, runs
from milepost.storage.parameters import DataSection, EnginesSection, ModelSection, Parameters, TrackingSection
from milepost.storage.prompt_source import parse_path
from milepost.storage.runs import RunExists, RunFolder
from milepost.storage.sft_rows import Dialogue, SftDataSection, Solved, bad_row, read_sft_rows
from milepost.storage.taught import Taught, came_of, taught
from milepost.storage.text import encodable
from milepost.storage.training import OptimizerSection, PerfSection


@dataclass(frozen=True)
class SftRun:
    """A fine-tuning that can start, with `parameters` as they were `given` and their secrets."""

    folder: RunFolder
    given: Parameters
    parameters: Parameters
    model_dir: str
    model_config: dict[str, Any]
    examples: list[Example]
    plan: SftPlan
    taught: Taught


def plan_sft(
    folder: RunFolder,
    *,
    data: SftDataSection,
    model: ModelSection,
    optimizer: OptimizerSection,
    perf: PerfSection,
    engines: EnginesSection,
    tracking: TrackingSection = TrackingSection(),
    steps: int | None = None,
    epochs: float | None = None,
) -> SftRun:
    """Check everything that can be checked before processes start; the first thing that is wrong is one sentence."""
    require_place(folder)
    if steps is not None and epochs is not None:
        raise ValueError(f"{steps} steps and {epochs:g} epochs are asked for: give one of them")
    if epochs is not None and not 0 < epochs < math.inf:
        raise ValueError(f"epochs is {epochs:g}, it must be more than 0")
    if engines.train == "none":
        raise ValueError("engines.train is 'none', and somebody has to train: set it to 'megatron'")
    own = DataSection(seed=data.seed)
    given = without_rollout(Parameters(model=model, data=own, perf=perf, engines=engines, tracking=tracking))
    parameters = given.resolved()
    if not model.path:
        raise ValueError("no model is given: name its folder with --model, or as model.path")
    model_dir = model_folder(parameters.model.path)
    config = json.loads(Path(model_dir, "config.json").read_text())
    check_layout(config, parameters.model)
    check_gpus(config, parameters)
    check_context(config, parameters)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=model.trust_remote_code)
    path: str = redaction.resolved(data.path)
    rows = read_sft_rows(path)
    found = [one for row in rows for one in _examples(row, path, tokenizer, template=data.apply_chat_template)]
    examples = _fitting(found, path, model.context_length)
    plan = _plan(len(examples), data, steps, epochs)
    schedule = {"optimizer": optimizer.ending_at(plan.steps)}
    check_schedule(schedule["optimizer"])
    return SftRun(
        folder=folder,
        given=given.model_copy(update=schedule),
        parameters=parameters.model_copy(update=schedule),
        model_dir=model_dir,
        model_config=config,
        examples=examples,
        plan=plan,
        taught=Taught(
            file=redaction.masked_text(absolute_root(path)),
            digest=files.digest_of(files.read(parse_path(path)[0])),
            rows=len(found),
            too_long=len(found) - len(examples),
            batch_size=data.batch_size,
            seed=data.seed,
        ),
    )


def require_place(folder: RunFolder) -> None:
    """ValueError or RunExists unless a fine-tuning may be made under this name, or gone on with."""
    if not files.is_local(folder.uri):
        raise ValueError(f"root {folder.uri.rpartition('/')[0]!r} is not a local folder: fine-tuned weights need one")
    if files.exists(folder.record) and taught(runs.load(folder)) and came_of(folder) is None:
        return
    runs.require_new(folder)
    if set(files.names(folder.uri)) - {"lease"}:
        raise RunExists(f"{folder.uri} already exists: choose another name")


def _plan(rows: int, data: SftDataSection, steps: int | None, epochs: float | None) -> SftPlan:
    """So many steps, or so many times every row, once if nothing else is said."""
    if steps is not None:
        return SftPlan(steps, data.batch_size, data.seed)
    wanted = max(1, round(rows * (1.0 if epochs is None else epochs)))
    return SftPlan(math.ceil(wanted / data.batch_size), data.batch_size, data.seed, examples=wanted)


def _examples(row: Dialogue | Solved, path: str, tokenizer: Tokenizer, *, template: bool) -> list[Example]:
    try:
        if isinstance(row, Solved):
            found = [solved_example(row.prompt, row.response, tokenizer, template=template)]
        else:
            learnable = tokenizer.dialogues(encodable(row.messages), encodable(row.tools))
            found = [dialogue_example(one, tokenizer) for one in learnable]
        return [replace(example, row=row.row) for example in found]
    except ValueError as error:
        raise bad_row(parse_path(path)[0], row.line, str(error)) from None


def solved_example(prompt: str, response: str, tokenizer: Tokenizer, *, template: bool) -> Example:
    """A prompt as it would be asked, and the response with the token that ends it."""
    asked = encodable(prompt)
    ids = tokenizer.render(asked) if template else tokenizer.encode(asked)
    if not ids:
        raise ValueError("the prompt has no tokens")
    return Example(prompt, ids, response, tokenizer.encode_response(encodable(response), ended=True))


def dialogue_example(found: Learnable, tokenizer: Tokenizer) -> Example:
    """A dialogue from its first token that the assistant says to its last, and as a prompt what comes before."""
    ids, mask = found.ids, found.mask
    if 1 not in mask:
        raise ValueError("no token of it is the assistant's, so there is nothing to learn")
    begin, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if not begin:
        raise ValueError("its first token is the assistant's, and nothing predicts that")
    said = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
    return Example(found.asked, ids[:begin], said, ids[begin:end], mask[begin:end])


def _fitting(found: list[Example], path: str, context_length: int) -> list[Example]:
    """The examples that the model is to be trained on; ValueError when all are too long."""
    fitting = [example for example in found if example.tokens <= context_length]
    if not fitting:
        shortest = min(example.tokens for example in found)
        raise ValueError(
            f"{path}: all {len(found)} rows are too long, the shortest has {shortest} tokens and the context "
            f"{context_length}: raise model.context_length to {shortest} or more"
        )
    return fitting
