"""`milepost data import`: rollouts that were made elsewhere as a stored run, which trains nothing and cannot go on.

It is made in a folder of its own, and appears under its name when it is whole.
"""

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from milepost.engines.local_graders import LocalGraders
from milepost.engines.tokenizer import Tokenizer, load_tokenizer
from milepost.flows.import_rows import Reader
from milepost.flows.import_steps import Scoring, Target, write_step
from milepost.flows.plan import model_folder
from milepost.flows.progress import progress_bar
from milepost.flows.recipe import absolute_root
from milepost.flows.staging import place, staging
from milepost.storage import files, runs
from milepost.storage.foreign import Contents, Group, read_contents
from milepost.storage.origin import IMPORTED, Origin
from milepost.storage.parameters import ModelSection, Parameters, RewardSection
from milepost.storage.prompt_order import Cursor
from milepost.storage.provenance import provenance
from milepost.storage.redaction import masked_text
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import concat, with_columns, write_table
from milepost.tasks.grading import require_reward

GROUPS_PER_STEP = 32


@dataclass(frozen=True)
class Import:
    """What somebody asked for. Without a `reward` the scores are those of the file, in `reward_key`."""

    file: str
    run: str
    root: str
    model: str
    chat_template: bool = True
    context_length: int = ModelSection().context_length
    reward: RewardSection | None = None
    reward_key: str = "reward"
    groups_per_step: int | None = None
    allow_mismatch: bool = False


@dataclass(frozen=True)
class Imported:
    """The run that a file became."""

    run: str
    steps: int
    groups: int
    samples: int
    origin: Origin


async def import_run(wanted: Import) -> Imported:
    """Make the run, all of it or nothing; ValueError names the line of a row that cannot be used, and why."""
    folder = runs.run_folder(wanted.root, wanted.run)
    runs.require_new(folder)
    if not wanted.model:
        raise ValueError("no tokenizer is given: name a model with --tokenizer, or a recipe with --config")
    contents = read_contents(wanted.file, wanted.reward_key)
    size = _groups_per_step(wanted, contents)
    steps = [contents.groups[start : start + size] for start in range(0, len(contents.groups), size)]
    model_dir = str(Path(wanted.model).absolute()) if Path(wanted.model).is_dir() else model_folder(wanted.model)
    tokenizer = load_tokenizer(model_dir)
    parameters = _parameters(wanted, size, max(len(group.lines) for group in contents.groups))
    file = masked_text(absolute_root(wanted.file))
    origin = Origin(file, contents.digest, contents.rows, contents.ignored)
    with staging(folder, "import") as staged:
        target = Target(staged, runs.parameters_digest(parameters), len(contents.groups))
        prompts = await _write_steps(wanted, target, contents, steps, tokenizer, origin)
        model = {"path": masked_text(wanted.model), "folder": model_dir, "tokenizer": tokenizer.digest}
        _create(staged, parameters, len(steps), prompts, model=model, origin=origin)
        place(staged, folder)
    return Imported(wanted.run, len(steps), len(contents.groups), contents.rows, origin)


def _groups_per_step(wanted: Import, contents: Contents) -> int:
    """As many as asked for; else those of the first step that the rows name, or a few."""
    if wanted.groups_per_step is not None:
        if wanted.groups_per_step < 1:
            raise ValueError(f"--groups-per-step is {wanted.groups_per_step}, it must be at least 1")
        return wanted.groups_per_step
    first = contents.groups[0].step
    return GROUPS_PER_STEP if first is None else sum(group.step == first for group in contents.groups)


def _parameters(wanted: Import, groups: int, samples: int) -> Parameters:
    """Those of a run that trains nothing, without an engine."""
    return Parameters.model_validate(
        {
            "model": {"path": wanted.model, "context_length": wanted.context_length},
            "data": {
                "path": absolute_root(wanted.file),
                "apply_chat_template": wanted.chat_template,
                "shuffle": False,
                "rollout_batch_size": groups,
                "n_samples_per_prompt": samples,
            },
            "rollout": {"shards": 1},
            "reward": wanted.reward or {"name": IMPORTED},
            "engines": {"train": "none", "rollout": "none"},
            "tracking": {"enabled": False},
        }
    )


async def _write_steps(
    wanted: Import,
    target: Target,
    contents: Contents,
    steps: Sequence[Sequence[Group]],
    tokenizer: Tokenizer,
    origin: Origin,
) -> pa.Table:
    """Every step in order; the prompts of all of them."""
    fs, path = files.filesystem(wanted.file)
    scoring, served, cursor = None, [], Cursor()
    with fs.open(path, "rb") as opened, LocalGraders() if wanted.reward else nullcontext() as graders:
        if wanted.reward and graders:
            await require_reward(graders, wanted.reward)
            scoring = Scoring(wanted.reward, graders)
        reader = Reader(
            contents=contents,
            opened=opened,
            reward_key=wanted.reward_key,
            tokenizer=tokenizer,
            chat_template=wanted.chat_template,
            context_length=wanted.context_length,
            allow_mismatch=wanted.allow_mismatch,
            origin=origin,
        )
        with progress_bar(f"import {wanted.run}", len(steps)) as advance:
            for step, groups in enumerate(steps):
                prompts, cursor = await write_step(target, step, reader, groups, cursor, scoring=scoring)
                served.append(prompts)
                advance(f"{cursor.served} groups")
    return concat(served, PROMPTS)


def _create(
    staged: RunFolder, parameters: Parameters, steps: int, served: pa.Table, *, model: dict[str, Any], origin: Origin
) -> None:
    """The prompt set, and the record of the run."""
    prompts = with_columns(served, {"group_id": [""] * served.num_rows})
    config = Path(model["folder"], "config.json")
    data = {"prompts": asdict(write_table(staged.prompts("train"), prompts, PROMPTS)), "eval": None}
    record = RunRecord(
        run_id=staged.run_id,
        steps=steps,
        parameters=parameters,
        parameters_digest=runs.parameters_digest(parameters),
        provenance=provenance(),
        data=data | {"too_long": 0, "bad_lines": 0} | origin.entry(),
        model=model | {"config": json.loads(config.read_text()) if config.is_file() else {}},
        started_at=time.time(),
    )
    runs.create(staged, record)
