"""Whether a run is what it says: every digest worked out again, every sum, every link between one step and the next."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from milepost.storage import attempts, checkpoints, files, purges, retention, runs, stops
from milepost.storage.batch_plan import batch_plan
from milepost.storage.carried import round_size
from milepost.storage.evaluated import evaluated
from milepost.storage.micro_batches import packing_rules
from milepost.storage.origin import origin_of
from milepost.storage.parameters import Parameters
from milepost.storage.parent import course_of, parent_run, steps_before
from milepost.storage.prompt_mixture import shares_of
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.tables import TableRef
from milepost.storage.taught import came_of, go_on_with, taught
from milepost.storage.verify_evaluation import check_evaluation
from milepost.storage.verify_prompts import check_epochs
from milepost.storage.verify_purges import check_purges
from milepost.storage.verify_step import RunFacts, Settings, StepFindings, check_step
from milepost.storage.verify_tables import RESTORE, WRITTEN_SO, Fault, base_name, load_json, load_table
from milepost.storage.verify_taught import check_learnt

CHUNK = 25
"""Steps that a process checks before it reports; a run of fewer than two chunks is checked in this one."""

Advance = Callable[[int], None]


@dataclass
class Verification:
    """What was checked, and what is wrong. Notes are no faults: what an interruption or a retention rule left."""

    run: str
    steps: int = 0
    tables: int = 0
    samples: int = 0
    checkpoints: int = 0
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def stored_steps(folder: RunFolder) -> list[int]:
    """Every step that has a folder, finished or not."""
    return [int(name) for name in files.names(files.join(folder.uri, "steps")) if name.isdigit()]


def verify(folder: RunFolder, *, workers: int | None = None, advance: Advance | None = None) -> Verification:
    """Check the whole of a run. LookupError when there is none; `advance` is told how many steps were checked."""
    record = runs.load(folder)
    result = Verification(folder.run_id)
    result.faults += _check_record(folder) + _check_data(folder, record, result)
    if result.faults:
        result.notes.append("the steps were not checked: what they are checked against is damaged")
        return result
    of = evaluated(record)
    if of is not None:
        made = check_evaluation(folder, record, of)
        goes_on = f"the evaluation is not finished: `milepost resume {folder.run_id}` goes on with it"
        _add_own_kind(result, [made], "" if made.finished else goes_on)
        _add_purges(result, folder)
        return result
    if taught(record):
        packing = packing_rules(record.parameters.model, record.parameters.perf)
        learnt = [check_learnt(folder, step, packing) for step in stored_steps(folder)]
        _add_own_kind(result, learnt, "" if came_of(folder) else f"it has not ended: {go_on_with(folder)}")
        _add_purges(result, folder)
        return result
    facts = _facts(folder, record)
    steps = stored_steps(folder)
    found = []
    for chunk in _checked(facts, steps, workers):
        found += chunk
        if advance is not None:
            advance(len(chunk))
    _add_steps(result, facts, sorted(found, key=lambda item: item.step))
    wanted = attempts.current(folder).steps
    if facts.course.taken and result.steps < wanted:
        result.notes.append(f"{result.steps} of {wanted} steps are made: `milepost resume {folder.run_id}` goes on")
    _check_evals(folder, result)
    _add_purges(result, folder)
    _check_begin(folder, record, result)
    _check_checkpoints(folder, [item.step for item in found if item.finished], result)
    return result


def _check_record(folder: RunFolder) -> list[Fault]:
    """The digests in `run.json` are those of what it says. Its own words count, not today's defaults."""
    content: dict[str, Any] = files.read_json(folder.record)
    packages = content["provenance"]["packages"]
    digests = {
        "parameters_digest": (content["parameters_digest"], files.canonical_json(content["parameters"])),
        "packages_digest": (content["provenance"]["packages_digest"], "\n".join(packages)),
    }
    return [
        Fault(
            folder.record, f"{name} is {stated[:12]}, its content gives {files.digest_of(text.encode())[:12]}", RESTORE
        )
        for name, (stated, text) in digests.items()
        if stated != files.digest_of(text.encode())
    ]


def _check_data(folder: RunFolder, record: RunRecord, result: Verification) -> list[Fault]:
    """The prompt sets that the run was given."""
    faults = []
    for name in ("prompts", "eval"):
        stored = record.data.get(name)
        if stored:
            found = load_table(folder.prompts(base_name(stored["uri"])), TableRef(**stored))
            result.tables += 1
            faults += [found] if isinstance(found, Fault) else []
    return faults


def _facts(folder: RunFolder, record: RunRecord) -> RunFacts:
    resumed = attempts.attempts(folder)
    every = [record.parameters, *(attempt.parameters for attempt in resumed)]
    settings = tuple(dict.fromkeys(_settings(parameters) for parameters in every))
    digests = {1: record.parameters_digest} | {attempt.number: attempts.digest(folder, attempt) for attempt in resumed}
    return RunFacts(
        folder,
        TableRef(**record.data["prompts"]),
        settings,
        digests,
        course_of(record),
        imported=origin_of(record) is not None,
        shares=shares_of(record.data),
        begun_purges=frozenset(name for purge in purges.unfinished(folder.uri) for name in purge.prompts),
    )


def _settings(parameters: Parameters) -> Settings:
    data = parameters.data
    plan = batch_plan(parameters)
    size = round_size(parameters, plan.rollout_batch_size)
    packing = packing_rules(parameters.model, parameters.perf)
    return Settings(plan, data.seed, data.shuffle, parameters.filter.on_too_few, size, packing)


def check_steps(facts: RunFacts, steps: list[int]) -> list[StepFindings]:
    return [check_step(facts, step) for step in steps]


def _checked(facts: RunFacts, steps: list[int], workers: int | None) -> Iterator[list[StepFindings]]:
    """The findings of all steps, in chunks and in any order; a long run on local files takes a process a core."""
    size = CHUNK if workers is None else max(1, min(CHUNK, len(steps) // workers))
    chunks = [steps[start : start + size] for start in range(0, len(steps), size)]
    count = min(workers or os.cpu_count() or 1, len(chunks))
    if count < 2 or not files.is_local(facts.folder.uri):
        yield from (check_steps(facts, chunk) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        for done in as_completed([pool.submit(check_steps, facts, chunk) for chunk in chunks]):
            yield done.result()


def _add_steps(result: Verification, facts: RunFacts, found: list[StepFindings]) -> None:
    folder = facts.folder
    result.steps = sum(item.finished for item in found)
    result.tables += sum(item.tables for item in found)
    result.samples += sum(item.samples for item in found)
    result.faults += [fault for item in found for fault in item.faults]
    known = {item.step: item for item in found}
    last = max(known, default=-1)
    for step in range(last):
        if step not in known or not known[step].finished:
            result.faults.append(Fault(folder.manifest(step), "is missing, and later steps are there", RESTORE))
    if found and not known[last].finished:
        result.notes.append(f"step {last} is not finished: `milepost resume {folder.run_id}` goes on with it")
    if not result.faults and not facts.course.taken:
        places = (place for item in found for place in item.served)
        result.faults += check_epochs(places, folder.prompts(base_name(facts.prompts.uri)), folder.uri)
    orphans = sum(len(item.orphans) for item in found)
    if orphans:
        result.notes.append(f"{orphans} tables are named by no commit: the stages that wrote them were cut short")


def _add_own_kind(result: Verification, found: list[StepFindings], left: str) -> None:
    """The steps of a run of another kind; `left` is what has to be done before it is whole, empty when it is."""
    result.steps, result.samples = sum(item.finished for item in found), sum(item.samples for item in found)
    result.tables += sum(item.tables for item in found)
    result.faults += [fault for item in found for fault in item.faults]
    result.notes += [left] if left else []


def _add_purges(result: Verification, folder: RunFolder) -> None:
    faults, notes = check_purges(folder)
    result.faults += faults
    result.notes += notes


def _check_evals(folder: RunFolder, result: Verification) -> None:
    """The tables that evaluations have committed."""
    place = files.join(folder.uri, "evals")
    for name in files.names(place):
        journal = files.join(place, name, "journal")
        for commit in files.names(journal):
            content = load_json(files.join(journal, commit))
            if isinstance(content, Fault):
                result.faults.append(content)
                continue
            for stored in content["tables"].values():
                found = load_table(files.join(place, name, base_name(stored["uri"])), TableRef(**stored))
                result.tables += 1
                result.faults += [found] if isinstance(found, Fault) else []


def _check_begin(folder: RunFolder, record: RunRecord, result: Verification) -> None:
    """The trainer state that a run has of its own when it begins in the middle of another."""
    parent = parent_run(record)
    if steps_before(parent) and course_of(record).trains and result.steps:
        result.checkpoints += 1
        uri = folder.checkpoint(0)
        result.faults += [Fault(uri, problem, RESTORE) for problem in checkpoints.faults(uri)]


def _check_checkpoints(folder: RunFolder, steps: list[int], result: Verification) -> None:
    """Every checkpoint that a manifest names is whole, or was removed by the rule that says which ones stay."""
    named: dict[int, dict[str, Any]] = {}
    for step in sorted(steps):
        closed = load_json(folder.manifest(step))
        if not isinstance(closed, Fault) and (closed["checkpoint"] or stops.has_saved(folder, step + 1)):
            named[step + 1] = closed
    removed, retired = 0, retention.removed(folder)
    for version, closed in named.items():
        uri = folder.checkpoint(version)
        if version in retired and not files.exists(files.join(uri, checkpoints.MANIFEST)):
            removed += 1
            continue
        result.checkpoints += 1
        result.faults += _check_checkpoint(folder, version, closed)
    if removed:
        result.notes.append(f"{removed} checkpoints were removed since, as checkpoint.keep_last and keep_every say")


def _last_key(closed: dict[str, Any]) -> str:
    """The key of the last batch of a step; empty when it trained none."""
    (optimize,) = (item for item in closed["commits"] if item["slot"].startswith("optimize-"))
    count = len(optimize["tables"])
    return f"{optimize['key']}-{count - 1:03d}" if count else ""


def _check_checkpoint(folder: RunFolder, version: int, closed: dict[str, Any]) -> list[Fault]:
    """Every file as its manifest says, and the weights those that the step left."""
    uri = folder.checkpoint(version)
    wrong = [Fault(uri, problem, RESTORE) for problem in checkpoints.faults(uri)]
    if wrong:
        return wrong
    held = checkpoints.load_manifest(uri)
    expected, last_key = closed["version_out"], _last_key(closed) or held.last_key
    found = f"{held.version.step}-{held.version.digest}"
    if found != expected:
        wrong.append(Fault(uri, f"holds weights {found}, its step left {expected}", WRITTEN_SO))
    if held.last_key != last_key:
        wrong.append(Fault(uri, f"ends with batch {held.last_key!r}, its step with {last_key!r}", WRITTEN_SO))
    if held.run_id != folder.run_id:
        wrong.append(Fault(uri, f"is of run {held.run_id!r}, not {folder.run_id!r}", RESTORE))
    return wrong
