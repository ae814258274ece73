"""The manifest of a step: digests of everything in it and of the manifest before it, published last."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from milepost.storage import files, lease, stops
from milepost.storage.journal import Commit
from milepost.storage.runs import RunFolder


@dataclass(frozen=True)
class StepManifest:
    """One finished step. `previous` is the digest of the manifest of the step before, empty for the first.

    `fence` is the number of the claim the step was closed under, 0 without one. `attempt` is the one that closed it,
    under parameters of `parameters_digest`; manifests from before these were kept have 0 and nothing.
    """

    run_id: str
    step: int
    previous: str
    version_in: str
    version_out: str
    checkpoint: str
    cursor: dict[str, int]
    commits: list[dict[str, Any]]
    accounting: dict[str, int]
    metrics: dict[str, float]
    fence: int = 0
    attempt: int = 0
    parameters_digest: str = ""


def commit_entries(commits: list[Commit]) -> list[dict[str, Any]]:
    """What the manifest keeps of each commit: enough to find and to check its tables."""
    return [
        {"slot": commit.slot, "key": commit.key, "tables": {name: asdict(ref) for name, ref in commit.tables.items()}}
        for commit in commits
    ]


def manifest_digest(folder: RunFolder, step: int) -> str:
    """Digest of the manifest of `step`; empty for a step before the first."""
    return files.digest_of(files.read(folder.manifest(step))) if step >= 0 else ""


def publish(folder: RunFolder, manifest: StepManifest) -> None:
    """LeaseLost, and nothing published, when the run was taken over.

    A step that the owner before closed in the same way, while it was taken over, stays as it is.
    """
    if manifest.fence:
        lease.check_fence(folder.uri, manifest.fence)
    try:
        files.publish_json(folder.manifest(manifest.step), asdict(manifest))
    except files.AlreadyPublished:
        if _outcome(load(folder, manifest.step)) != _outcome(manifest):
            raise


def _outcome(manifest: StepManifest) -> StepManifest:
    """What has to be equal when two owners close a step: all but how long it took, and who was first."""
    return replace(manifest, metrics={}, fence=0, attempt=0, parameters_digest="")


def load(folder: RunFolder, step: int) -> StepManifest:
    """The manifest of a step, with its tables and checkpoint where the run is now, wherever it was then."""
    found = StepManifest(**files.read_json(folder.manifest(step)))
    place, saved = folder.step(step), bool(found.checkpoint) or stops.has_saved(folder, step + 1)
    commits = [
        entry | {"tables": {name: files.moved(ref, place) for name, ref in entry["tables"].items()}}
        for entry in found.commits
    ]
    return replace(found, commits=commits, checkpoint=folder.checkpoint(step + 1) if saved else "")


def finished_steps(folder: RunFolder) -> list[int]:
    """Steps whose manifest is published, in order."""
    steps = [int(name) for name in files.names(files.join(folder.uri, "steps")) if name.isdigit()]
    return [step for step in steps if files.exists(folder.manifest(step))]
