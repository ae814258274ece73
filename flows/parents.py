"""Runs that go on from the stored stages of another: what they have from there, and what has to be there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from milepost.engines.tokenizer import load_tokenizer
from milepost.flows.step_range import require_steps
from milepost.storage import attempts, checkpoints, manifest, purges, runs, tables
from milepost.storage.batch_plan import with_decay_steps
from milepost.storage.journal import Slot
from milepost.storage.parameters import Parameters
from milepost.storage.parent import ParentRun, course_of, parent_run, steps_before, trained_steps
from milepost.storage.prompt_mixture import shares_of
from milepost.storage.prompts import PromptSet, stored_prompts
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.stages import Course, Stage
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.take import stored_stages

# What decided how a stage came out: a run that takes its tables has these sections, or fields of them, from there.
DECIDES: dict[Stage, tuple[str, ...]] = {
    "sample": ("data.rollout_batch_size", "rollout.tools", "rollout.tool_format"),
    "generate": ("data.n_samples_per_prompt", "rollout"),
    "score": ("reward",),
    "filter": ("filter", "off_policy.max_staleness"),
}
# Of those, how fast or how patiently it was done: nobody misses another value.
SPEED = (
    *("rollout.shards", "rollout.concurrency", "rollout.timeout_seconds", "rollout.tool_workers"),
    *("reward.workers", "reward.timeout_seconds"),
)


def decided(stages: tuple[Stage, ...]) -> Iterator[tuple[str, str]]:
    """Section and field of everything that decided `stages`."""
    for name in (name for stage in stages for name in DECIDES[stage]):
        section, _, field = name.partition(".")
        yield from [(section, field)] if field else ((section, each) for each in _fields(section))


def _fields(section: str) -> list[str]:
    return list(type(getattr(Parameters(), section)).model_fields)


def adopted(parameters: Parameters, before: Parameters, run: str, stages: tuple[Stage, ...]) -> Parameters:
    """`parameters` with what decided `stages` as it was in `run`, which had `before`; engines are not needed for them.

    ValueError for a field that was given another value.
    """
    sections: dict[str, dict[str, object]] = {}
    shown = [each.model_dump(mode="json") for each in (parameters, before, Parameters())]
    for section, field in decided(stages):
        given, stored, default = (each[section][field] for each in shown)
        if given not in (stored, default) and f"{section}.{field}" not in SPEED:
            raise ValueError(
                f"{section}.{field} is {given!r}, what run {run!r} has stored was made with {stored!r}: leave it out"
            )
        holder = parameters if given == stored else before  # whoever gave it has its secrets
        sections.setdefault(section, {})[field] = getattr(getattr(holder, section), field)
    if "generate" in stages:
        sections["engines"] = {"rollout": "none"}
    changed = {name: getattr(parameters, name).model_copy(update=fields) for name, fields in sections.items()}
    return parameters.model_copy(update=changed)


@dataclass(frozen=True)
class Source:
    """The run that another goes on from, with the parameters of the steps that are taken."""

    parent: ParentRun
    folder: RunFolder
    record: RunRecord
    parameters: Parameters
    steps: range

    def model_folder(self, path: str) -> str:
        """The folder that it made of the model at `path`, when that is its own and still there; else nothing."""
        folder: str = self.record.model["folder"]
        return folder if path == self.record.parameters.model.path and Path(folder).is_dir() else ""

    @property
    def prompts(self) -> PromptSet:
        data = self.record.data
        table = read_table(TableRef(**data["prompts"]))
        return stored_prompts(table, too_long=data["too_long"], bad_lines=data["bad_lines"], shares=shares_of(data))


def stored_rollouts(parameters: Parameters) -> ParentRun | None:
    """The parent of a run that trains on `data.rollouts`, if it is set."""
    if not parameters.data.rollouts:
        return None
    if parameters.engines.train == "none":
        raise ValueError(
            "data.rollouts takes what was generated, and engines.train 'none' trains nothing on it: leave one out"
        )
    return ParentRun(parameters.data.rollouts, 0, "filter")


def going_on(parameters: Parameters, before: RunRecord) -> Parameters:
    """`parameters` as they are for a run that is there: what it took from another stays as it has it.

    So does the optimizer step at which its learning rate ends, unless another one is given.
    """
    if before.parameters.optimizer.decay_steps is not None:
        ending = parameters.optimizer.ending_at(before.parameters.optimizer.decay_steps)
        parameters = parameters.model_copy(update={"optimizer": ending})
    if parent := parent_run(before):
        parameters = adopted(parameters, before.parameters, parent.run, course_of(before).taken)
    return with_decay_steps(parameters, trained_steps(before))


def open_source(parent: ParentRun, root: str, run: str, steps: int) -> Source:
    """The parent of `run`, which is to have as many steps; ValueError or LookupError when it cannot be."""
    if parent.run == run:
        raise ValueError(f"run {run!r} cannot go on from itself: give it another name")
    folder = runs.run_folder(root, parent.run)
    record = require_steps(folder)
    finished = len(manifest.finished_steps(folder))
    taken = range(parent.begin, parent.begin + steps)
    if taken.stop > finished:
        raise ValueError(
            f"run {parent.run!r} has {finished} finished steps and {taken.stop} are asked for: lower the steps, or "
            f"`milepost resume {parent.run}` first"
        )
    return Source(parent, folder, record, _parameters(folder, taken, Course(first=parent.first).taken), taken)


def _parameters(folder: RunFolder, steps: range, stages: tuple[Stage, ...]) -> Parameters:
    """Those that the first of the steps were made with; ValueError when later ones were made with others."""
    numbers = dict.fromkeys(manifest.load(folder, step).attempt for step in steps)
    first, *others = (attempts.parameters_of(folder, number) for number in numbers)
    for other in others:
        for section, field in decided(stages):
            before, after = (getattr(getattr(each, section), field) for each in (first, other))
            if before != after and f"{section}.{field}" not in SPEED:
                raise ValueError(
                    f"run {folder.run_id!r} changed {section}.{field} from {before!r} to {after!r} on the way: "
                    "take fewer of its steps"
                )
    return first


def check_source(source: Source, parameters: Parameters, model_dir: str) -> None:
    """ValueError or FileNotFoundError unless every table that is taken is whole, and the model reads its tokens."""
    parent = source.parent
    if parameters.model.context_length < source.parameters.model.context_length:
        raise ValueError(
            f"model.context_length {parameters.model.context_length} is less than the "
            f"{source.parameters.model.context_length} of run {parent.run!r}: its samples may be longer, so raise it"
        )
    if parameters.engines.train != "none" and steps_before(parent):
        _check_begin(source, model_dir)
    _check_tokenizer(source, parameters, model_dir)
    for step in source.steps:
        _check_tables(source, step, parameters)


def _check_begin(source: Source, model_dir: str) -> None:
    """ValueError unless the trainer that the parent had before the first step that is taken can be had again."""
    parent, record = source.parent, source.record
    if model_dir != record.model["folder"]:
        fix = "leave it out" if parent.earlier else "begin at step 0, or leave it out"
        raise ValueError(
            f"model.path is another than that of run {parent.run!r}, whose trainer before step {parent.begin} the run "
            f"would begin with: {fix}"
        )
    if not course_of(record).trains:
        raise ValueError(
            f"run {parent.run!r} trains nothing, so there is no trainer before step {parent.begin}: begin at step 0"
        )
    saved = checkpoints.complete(source.folder, hashes=False)
    if parent.earlier and not any(number <= parent.begin for number in saved):
        raise ValueError(
            f"{source.folder.checkpoint(0)}, which run {parent.run!r} began with, is not whole: restore it from a copy"
        )


def _check_tokenizer(source: Source, parameters: Parameters, model_dir: str) -> None:
    known = source.record.model.get("tokenizer", "")
    found = load_tokenizer(model_dir, trust_remote_code=parameters.model.trust_remote_code).digest
    if known and known != found:
        raise ValueError(
            f"model.path {parameters.model.path!r} has another tokenizer than run {source.parent.run!r}, whose stored "
            "tokens would mean something else: take a model with the same one"
        )


def _check_tables(source: Source, step: int, parameters: Parameters) -> None:
    purges.require_whole(source.folder.step(step))
    stages = Course(first=source.parent.first).taken
    stated = {entry["slot"]: entry["tables"] for entry in manifest.load(source.folder, step).commits}
    for commit in stored_stages(source.folder, step, stages):
        for name, ref in commit.tables.items():
            tables.require(ref)
            if stated.get(commit.slot, {}).get(name, {}).get("digest") != ref.digest:
                raise tables.DamagedTable(
                    f"{ref.uri} is not the table that {source.folder.manifest(step)} names: restore it from a copy"
                )
            is_generated = Slot.parse(commit.slot).stage == "generate"
            if is_generated and parameters.engines.train != "none":
                _require_logprobs(ref, source.parent.run, parameters)


def _require_logprobs(ref: TableRef, run: str, parameters: Parameters) -> None:
    """ValueError where the rollout's own log-probabilities are needed, and samples that may be trained on have none."""
    needed = "algorithm.old_logprobs=rollout" if parameters.algorithm.old_logprobs == "rollout" else ""
    needed = "off_policy" if parameters.off_policy.weighs else needed
    if not needed:
        return
    table = read_table(ref)
    if table.filter(pc.not_equal(table["status"], "invalid"))["rollout_logprobs"].null_count:
        fix = "leave its weights, reject and veto out" if needed == "off_policy" else "set it to recompute"
        raise ValueError(f"{needed} needs log-probabilities, and samples of run {run!r} have none: {fix}")
