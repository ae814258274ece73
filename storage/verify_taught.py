"""Whether a supervised fine-tuning is what it says: every batch as it was written, in a chain of manifests."""

from milepost.storage import files
from milepost.storage.micro_batches import PackingRules
from milepost.storage.runs import RunFolder
from milepost.storage.verify_micro_batches import check_micro_batches
from milepost.storage.verify_samples import check_rows
from milepost.storage.verify_step import StepFindings, against_manifest
from milepost.storage.verify_stored import StoredStep, read_entries, read_tables
from milepost.storage.verify_tables import RESTORE, Fault, load_json


def check_learnt(folder: RunFolder, step: int, packing: PackingRules) -> StepFindings:
    """Everything that can be said of one step. A file that cannot be read ends the check: the rest would follow."""
    uri, place = folder.step(step), folder.manifest(step)
    findings = StepFindings(step, files.exists(place))
    manifest = load_json(place) if findings.finished else None
    entries = read_entries(uri, findings.faults)
    tables = read_tables(uri, entries, findings.faults)
    findings.tables = sum(len(part) for part in tables.values())
    if isinstance(manifest, Fault):
        findings.faults.append(manifest)
    elif manifest is not None:
        findings.faults += against_manifest(place, manifest, entries)
        before = folder.manifest(step - 1)
        if step and files.exists(before) and manifest["previous"] != files.digest_of(files.read(before)):
            findings.faults.append(Fault(place, "names another manifest before it than there is", RESTORE))
    if not findings.faults:
        stored = StoredStep(step, uri, None, None, entries, tables)
        learnt = stored.stack("optimize")
        findings.samples = learnt.table.num_rows
        findings.faults += check_rows(learnt, folder.run_id, step)
        for slot, entry in stored.entries.items():
            findings.faults += check_micro_batches(entry["record"], learnt, packing, stored.commit_uri(slot))
    return findings
