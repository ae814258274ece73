"""Whether an evaluation is what it says: its tables, how each came of the one before, and whose weights it is of."""

import pyarrow as pa

from milepost.storage import files, purges
from milepost.storage.evaluated import Evaluated
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.verify_samples import check_groups, check_rows, check_stage, check_versions
from milepost.storage.verify_step import StepFindings, against_manifest
from milepost.storage.verify_stored import StoredStep, read_entries, read_tables
from milepost.storage.verify_tables import WRITTEN_SO, Fault, load_json, stack


def check_evaluation(folder: RunFolder, record: RunRecord, of: Evaluated) -> StepFindings:
    """Everything that can be said of it. A file that cannot be read ends the check: the rest would follow."""
    uri = folder.step(0)
    findings = StepFindings(0, files.exists(folder.manifest(0)))
    found = load_json(folder.manifest(0)) if findings.finished else None
    entries = read_entries(uri, findings.faults)
    begun = {name for purge in purges.unfinished(folder.uri) for name in purge.prompts}
    tables = read_tables(uri, entries, findings.faults, begun=begun)
    findings.tables = sum(len(part) for part in tables.values())
    if isinstance(found, Fault):
        findings.faults.append(found)
    elif found is not None:
        findings.faults += against_manifest(folder.manifest(0), found, entries)
    if not findings.faults:
        manifest = None if isinstance(found, Fault) else found
        stored = StoredStep(0, uri, manifest, None, entries, tables)
        findings.samples = stored.stack("evaluate").table.num_rows
        findings.faults += check_rows(stored.stack("score"), folder.run_id, 0) + _check_sets(stored, record)
        findings.faults += _check_weights(folder, stored, of)
    return findings


def _check_sets(stored: StoredStep, record: RunRecord) -> list[Fault]:
    """Scoring changed its own columns only, and the table of each finished set has all samples of its prompts."""
    faults = []
    for slot in stored.slots("score"):
        before = stack([stored.tables["generate", *slot[1:]]["rollouts"]])
        faults += check_stage("score", before, stack([stored.tables[slot]["rollouts"]]))
    for slot in stored.slots("evaluate"):
        served = stored.tables["sample", *slot[1:]]["prompts"][1]
        prompts = dict(zip(served["group_id"].to_pylist(), served["prompt_id"].to_pylist(), strict=True))
        rows, wanted = stack([stored.tables[slot]["rollouts"]]), record.parameters.eval.sets[slot[1]]
        faults += check_groups(rows, prompts, wanted.n_samples_per_prompt)
        shards = [stored.tables[other]["rollouts"][1] for other in stored.slots("score") if other[1] == slot[1]]
        scores = sorted(pair for table in shards for pair in _scores(table))
        if sorted(_scores(rows.table)) != scores:
            faults.append(Fault(stored.commit_uri(slot), "has other scores than its shards", WRITTEN_SO))
    return faults


def _scores(table: pa.Table) -> list[tuple[str, str]]:
    names, rewards = (table[name].to_pylist() for name in ("sample_id", "reward"))
    return [(name, repr(reward)) for name, reward in zip(names, rewards, strict=True)]


def _check_weights(folder: RunFolder, stored: StoredStep, of: Evaluated) -> list[Fault]:
    """Every sample is of the weights that the manifest names, and these are those that were asked for."""
    if stored.manifest is None:
        return []
    named = stored.manifest["version_in"]
    faults = check_versions(stored.stack("evaluate"), named)
    if of.version and named != of.version:
        faults.append(Fault(folder.manifest(0), f"is of weights {named}, {of.version} were to be scored", WRITTEN_SO))
    return faults
