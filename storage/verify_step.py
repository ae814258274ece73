"""One step of a run, checked on its own but for the manifest before it, which says where it began."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from milepost.storage import files
from milepost.storage.accounting import accounting
from milepost.storage.batch_plan import BatchPlan
from milepost.storage.manifest import StepManifest
from milepost.storage.micro_batches import PackingRules
from milepost.storage.parent import taken_from
from milepost.storage.prompt_mixture import Share
from milepost.storage.runs import RunFolder
from milepost.storage.stages import WHOLE, Course
from milepost.storage.tables import TableRef
from milepost.storage.verify_batches import check_batches, check_results
from milepost.storage.verify_carried import carried_here, check_carried
from milepost.storage.verify_micro_batches import check_micro_batches
from milepost.storage.verify_prompts import Place, Served, check_served
from milepost.storage.verify_samples import check_groups, check_kept, check_rows, check_stage, check_versions
from milepost.storage.verify_stored import SHARDED, Entry, SlotKey, StoredStep, read_entries, read_tables
from milepost.storage.verify_tables import RESTORE, WRITTEN_SO, Fault, Stack, base_name, load_json, stack
from milepost.storage.verify_taken import check_taken, samples_vary

ON_THE_WAY = ("for-", "logprobs-", "values-")  # how names of tables begin that a trainer is asked with, and answers
_MANIFEST_FIELDS = [item.name for item in fields(StepManifest) if item.default is MISSING]


@dataclass(frozen=True)
class Settings:
    """What a step was made with. A run that was resumed with changes has one for each attempt."""

    plan: BatchPlan
    seed: int
    shuffle: bool
    on_too_few: str
    round_size: int
    packing: PackingRules


@dataclass(frozen=True)
class RunFacts:
    """What every step of a run is checked against."""

    folder: RunFolder
    prompts: TableRef
    settings: tuple[Settings, ...]
    attempts: dict[int, str]
    """The digest of the parameters of each attempt."""
    course: Course = WHOLE
    imported: bool = False
    """Its samples were made elsewhere: by unknown weights, in groups of any size up to the stated one."""
    shares: tuple[Share, ...] = ()
    """The prompt sets of a mixture."""
    begun_purges: frozenset[str] = frozenset()
    """Prompts whose purge was killed before its end."""


@dataclass
class StepFindings:
    """What was found in a step. `served` has the place of every prompt it served; a fault may empty the rest."""

    step: int
    finished: bool
    faults: list[Fault] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    tables: int = 0
    samples: int = 0
    served: list[Place] = field(default_factory=list)


def check_step(facts: RunFacts, step: int) -> StepFindings:
    """Everything that can be said of one step. A file that cannot be read ends the check: the rest would follow."""
    uri = facts.folder.step(step)
    present = files.names(uri)
    findings = StepFindings(step, "manifest.json" in present)
    manifest = _manifest(facts.folder, step, findings) if findings.finished else None
    before = _manifest(facts.folder, step - 1, findings) if step else None
    entries = read_entries(uri, findings.faults)
    if manifest is not None:
        findings.faults += against_manifest(files.join(uri, "manifest.json"), manifest, entries)
        findings.faults += _chain(facts, manifest, before)
    tables = read_tables(uri, entries, findings.faults, begun=facts.begun_purges)
    named = {base_name(uri) for found in tables.values() for uri, _ in found.values()}
    findings.orphans = [name for name in present if name.endswith(".parquet") and not _is_explained(name, named)]
    findings.tables = len(named)
    if not findings.faults:
        _check_contents(facts, StoredStep(step, uri, manifest, before, entries, tables), findings)
    if manifest is not None:
        findings.faults += _check_attempt(facts, manifest)
    return findings


def _is_explained(table: str, named: set[str]) -> bool:
    """Whether a commit names a table, or it went to an engine and back on the way to one that is committed."""
    return table in named or table.startswith(ON_THE_WAY)


def _manifest(folder: RunFolder, step: int, findings: StepFindings) -> Entry | None:
    found = load_json(folder.manifest(step))
    if not isinstance(found, Fault):
        lacking = [name for name in _MANIFEST_FIELDS if name not in found]
        if not lacking:
            return found
        found = Fault(folder.manifest(step), f"has no {lacking[0]!r}", RESTORE)
    if step == findings.step:
        findings.faults.append(found)
    return None  # the step before reports its own


def against_manifest(file: str, manifest: Entry, entries: dict[SlotKey, Entry]) -> list[Fault]:
    """The manifest names exactly the journal's commits, with their keys and tables."""
    stated = {item["slot"]: item for item in manifest["commits"]}
    stored = {item["slot"]: item for item in entries.values()}
    faults = []
    for slot in sorted(stated.keys() | stored.keys()):
        journal = files.join(file.rsplit("/", 1)[0], "journal", f"{slot}.json")
        if slot not in stored:
            faults.append(Fault(journal, "is missing, the manifest of the step names it", RESTORE))
        elif slot not in stated:
            faults.append(Fault(journal, "is not named by the manifest of the step", "remove it if nothing wrote it"))
        elif _without_place(stated[slot]) != _without_place(stored[slot]):
            faults.append(Fault(journal, "differs from what the manifest says of it", RESTORE))
    return faults


def _without_place(entry: Entry) -> tuple[str, dict[str, Any]]:
    """Key and tables, wherever the run was when this was written: it may have been moved before a step was finished."""
    return entry["key"], {name: files.moved(ref, "") for name, ref in entry["tables"].items()}


def _chain(facts: RunFacts, manifest: Entry, before: Entry | None) -> list[Fault]:
    """The manifest names the one before by digest, goes on where it ended, and is one version ahead if it trained."""
    folder, step = facts.folder, manifest["step"]
    file = folder.manifest(step)
    faults = []
    if manifest["run_id"] != folder.run_id:
        faults.append(Fault(file, f"is of run {manifest['run_id']!r}, not {folder.run_id!r}", RESTORE))
    if problem := _wrong_versions(facts, manifest):
        faults.append(Fault(file, problem, WRITTEN_SO))
    if before is None:
        digest = "" if step == 0 else manifest["previous"]
    else:
        digest = files.digest_of(files.read(folder.manifest(step - 1)))
        if manifest["version_in"] != before["version_out"]:
            problem = f"begins with weights {manifest['version_in']}, the step before left {before['version_out']}"
            faults.append(Fault(file, problem, WRITTEN_SO))
    if manifest["previous"] != digest:
        faults.append(
            Fault(
                file, f"names {manifest['previous'][:12]!r} as the manifest before, which is {digest[:12]!r}", RESTORE
            )
        )
    return faults


def _wrong_versions(facts: RunFacts, manifest: Entry) -> str:
    """What is wrong with the weights that a step names as its own; empty when nothing is."""
    into, out = manifest["version_in"], manifest["version_out"]
    if facts.imported:
        return f"names weights {into or out}, and its samples were imported" if into or out else ""
    numbers = tuple(int(version.partition("-")[0]) for version in (into, out))
    due = (manifest["step"], manifest["step"] + 1) if facts.course.trains else (0, 0)
    if numbers != due:
        return f"goes from version {numbers[0]} to {numbers[1]}, not {due[0]} to {due[1]}"
    if not facts.course.trains and into != out:
        return "trained nothing and left other weights than it began with"
    return ""


def _check_attempt(facts: RunFacts, manifest: Entry) -> list[Fault]:
    """The step was closed by an attempt of the run, under its parameters; older manifests do not say."""
    number, digest = manifest.get("attempt", 0), manifest.get("parameters_digest", "")
    known = facts.attempts | {0: ""}
    if known.get(number) == digest:
        return []
    stored = f"whose parameters have digest {known[number][:12]}" if number in known else "of which nothing is stored"
    problem = f"names parameters {digest[:12]!r} of attempt {number}, {stored}"
    return [Fault(facts.folder.manifest(manifest["step"]), problem, RESTORE)]


def _check_contents(facts: RunFacts, stored: StoredStep, findings: StepFindings) -> None:
    """Rows, stages, batches and sums, by the settings that fit best: a resumption may have changed them."""
    findings.faults += _check_stages(stored, facts.course)
    if findings.faults:
        return
    tries = [_with_settings(facts, stored, settings) for settings in facts.settings]
    served, faults = min(tries, key=lambda found: len(found[1]))
    newest = stored.newest()
    findings.served, findings.samples = served.places, newest.table.num_rows
    findings.faults += faults + check_rows(newest, facts.folder.run_id, stored.step)
    findings.faults += check_taken(facts.folder, stored) + check_carried(facts.folder, stored)
    findings.faults += _check_shards(stored) + check_kept(stored.stack("filter")) + _check_stamps(stored, newest)
    if stored.manifest is not None:
        findings.faults += _check_accounting(facts, stored, served)


def _check_stages(stored: StoredStep, course: Course) -> list[Fault]:
    """A finished step has each of its shards at every stage; no shard is ahead of the stage that feeds it."""
    shards = {stage: {slot[1:] for slot in stored.slots(stage)} for stage in SHARDED}
    faults = []
    for early, late in (("generate", "score"), ("score", "filter")):
        wrong = shards[early] ^ shards[late] if stored.manifest else shards[late] - shards[early]
        for round_, shard in sorted(wrong):
            done, lacking = (early, late) if (round_, shard) in shards[early] else (late, early)
            file = stored.commit_uri((done, round_, shard))
            faults.append(Fault(file, f"has no {lacking} beside it for the same shard", RESTORE))
    wanted = ("sample", "optimize") if course.trains else ("sample",)
    unnamed = [stage for stage in wanted if not stored.slots(stage)]
    if stored.manifest and unnamed:
        faults.append(Fault(files.join(stored.uri, "manifest.json"), f"names no {unnamed[0]}", RESTORE))
    return faults


def _with_settings(facts: RunFacts, stored: StoredStep, settings: Settings) -> tuple[Served, list[Fault]]:
    rounds = [
        (stored.commit_uri(slot), stored.entries[slot]["record"], stored.tables[slot]["prompts"])
        for slot in stored.slots("sample")
    ]
    cursor = None  # the order of prompts that were taken is the other run's
    if not facts.course.taken and not facts.imported and (stored.before is not None or stored.step == 0):
        cursor = stored.before["cursor"] if stored.before else {"epoch": 0, "position": 0, "served": 0}
    served, faults = check_served(
        rounds,
        cursor,
        facts.folder.prompts(base_name(facts.prompts.uri)),
        step=stored.step,
        count=settings.round_size,
        seed=settings.seed,
        shuffle=settings.shuffle,
        shares=facts.shares,
    )
    if stored.manifest and served.cursor != stored.manifest["cursor"]:
        file = files.join(stored.uri, "manifest.json")
        faults.append(
            Fault(file, f"has cursor {stored.manifest['cursor']}, sampling ended at {served.cursor}", WRITTEN_SO)
        )
    size = settings.plan.n_samples_per_prompt
    exact = not facts.imported and not samples_vary(stored)
    faults += check_groups(stored.newest(), served.prompts, size, exact=exact)
    for slot in stored.slots("optimize"):
        uri, entry, batches = stored.commit_uri(slot), stored.entries[slot], stored.stack("optimize")
        faults += check_batches(
            stored.stack("filter"), batches, settings.plan, on_too_few=settings.on_too_few, commit_uri=uri
        )
        faults += check_results(entry["record"], entry["key"], batches, uri)
        faults += check_micro_batches(entry["record"], batches, settings.packing, uri)
    return served, faults


def _check_shards(stored: StoredStep) -> list[Fault]:
    """Each stage changed only its own columns."""
    faults = []
    for early, late in (("generate", "score"), ("score", "filter")):
        slots = stored.slots(late)
        before = [stored.tables[(early, *slot[1:])]["rollouts"] for slot in slots]
        faults += check_stage(late, stack(before), stack([stored.tables[slot]["rollouts"] for slot in slots]))
    return faults


def _check_stamps(stored: StoredStep, rows: Stack) -> list[Fault]:
    """Samples are of the weights that the step began with, or of those that generated what was taken, if known."""
    carried = carried_here(stored)
    records = [stored.entries[slot]["record"] for slot in stored.slots("generate")]
    if records and (taken := taken_from(records[0])):
        return check_versions(rows, taken.version, carried) if taken.version else []
    version = (
        stored.manifest["version_in"] if stored.manifest else stored.before["version_out"] if stored.before else ""
    )
    return check_versions(rows, version, carried) if version else []


def _check_accounting(facts: RunFacts, stored: StoredStep, served: Served) -> list[Fault]:
    """The stored classes are those that the tables give, and they sum to what was served."""
    assert stored.manifest is not None
    trained = set(stored.stack("optimize").table["group_id"].to_pylist()) if facts.course.trains else None
    counts = accounting(served.prompts, stored.stack("filter").table, trained)
    stated, file = stored.manifest["accounting"], facts.folder.manifest(stored.step)
    faults = []
    if counts != stated:
        faults.append(Fault(file, f"counts {stated}, its tables give {counts}", WRITTEN_SO))
    lost = [name for name in ("pending", "unserved") if name in counts]
    if lost:
        faults.append(Fault(file, f"{counts[lost[0]]} prompts are {lost[0]} in a finished step", WRITTEN_SO))
    return faults
