"""What became of every prompt: each serving ends in exactly one class, in a step and in an epoch.

Classes: trained, `filtered: REASON`, aborted, unused (kept, but the step had enough), kept (in a run that trains
nothing), too_long and malformed (set aside before the run), interrupted (not finished when the step had enough: the
next step serves it again, and in its epoch it counts there alone),
pending (not served yet, or served and not finished).
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import pyarrow as pa

from milepost.storage import files, manifest, runs
from milepost.storage.carried import INTERRUPTED
from milepost.storage.manifest import StepManifest
from milepost.storage.prompt_mixture import Share, shares_of
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table

SERVED, TOTAL = "served", "prompts"
_ABORTED = "aborted"

Epoch = tuple[str, int]
"""An epoch of a data set of a mixture; of a run of a single set, whose name is left out."""


class AccountingError(RuntimeError):
    """The classes of the served prompts do not sum to the prompts that were served."""


def group_classes(rollouts: pa.Table, trained: set[str] | None) -> dict[str, str]:
    """The class of every group in a filtered rollouts table; `trained` is None in a run that trains nothing.

    A group is aborted when all its samples are; the reason of a dropped group is otherwise the first of another kind.
    """
    members: dict[str, list[str | None]] = {}
    columns = (rollouts[name].to_pylist() for name in ("group_id", "kept", "drop_reason"))
    for group, kept, reason in zip(*columns, strict=True):
        members.setdefault(group, []).append(None if kept else str(reason))
    left = "kept" if trained is None else "unused"
    chosen = trained or set()
    return {group: "trained" if group in chosen else _not_trained(reasons, left) for group, reasons in members.items()}


def _not_trained(reasons: list[str | None], left: str) -> str:
    """`left` for a group with a kept sample."""
    if None in reasons:
        return left
    if INTERRUPTED in reasons:
        return INTERRUPTED
    first = next((reason for reason in reasons if reason != _ABORTED), None)
    return _ABORTED if first is None else f"filtered: {first}"


def accounting(served: Iterable[str], rollouts: pa.Table, trained: set[str] | None) -> dict[str, int]:
    """How the groups `served` by a step ended; the classes of a step that is finished sum to its `served`.

    A group without a sample is pending. Samples of a group that was not served count as `unserved`, which is an error.
    """
    found = group_classes(rollouts, trained)
    wanted = list(served)
    classes = Counter(found.get(group, "pending") for group in wanted)
    unserved = len(found.keys() - set(wanted))
    if unserved:
        classes["unserved"] = unserved
    return {**dict(sorted(classes.items())), SERVED: len(wanted)}


def check_accounting(counts: dict[str, int], step: int) -> None:
    """AccountingError, with the numbers, unless every prompt that `step` served has ended in one class."""
    ended = sum(count for name, count in counts.items() if name not in (SERVED, "pending", "unserved"))
    if ended != counts[SERVED] or "pending" in counts or "unserved" in counts:
        raise AccountingError(
            f"step {step} served {counts[SERVED]} prompts and {ended} have ended ({_shown(counts)}): "
            "a rollout function must return a sample for every prompt, and no other"
        )


def _shown(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if name != SERVED)


def epoch_accounting(folder: RunFolder) -> dict[Epoch, dict[str, int]]:
    """For every epoch that a finished step served from: how its prompts ended. The classes sum to `prompts`."""
    data = runs.load(folder).data
    finished = [manifest.load(folder, step) for step in manifest.finished_steps(folder)]
    shares = {share.name: share for share in shares_of(data)}
    epochs: dict[Epoch, Counter[str]] = {}
    cursor = {"epoch": 0, "position": 0, "served": 0}
    left = False
    for number, closed in enumerate(finished):
        leaves = INTERRUPTED in closed.accounting
        for epoch, classes in _classes_by_epoch(folder, closed, cursor, by_table=bool(shares) or left or leaves):
            if leaves and number + 1 < len(finished):
                classes.pop(INTERRUPTED, None)  # the next step has served them once more
            epochs.setdefault((epoch[0] if shares else "", epoch[1]), Counter()).update(classes)
        cursor, left = closed.cursor, leaves
    whole = Share("", data["prompts"]["rows"], 1.0, data["too_long"], data["bad_lines"])
    return {epoch: _with_total(classes, shares.get(epoch[0], whole)) for epoch, classes in sorted(epochs.items())}


def _classes_by_epoch(
    folder: RunFolder, closed: StepManifest, before: dict[str, int], *, by_table: bool
) -> Iterator[tuple[Epoch, dict[str, int]]]:
    """The stored counts of a step that stays in one epoch; only for one that does not are its tables read.

    Prompts of several sets, or of the step before, are of several epochs in any step: those are always read.
    """
    after = closed.cursor
    stays = after["epoch"] == before["epoch"] or (after["epoch"], after["position"]) == (before["epoch"] + 1, 0)
    if stays and not by_table:
        yield ("", before["epoch"]), {name: count for name, count in closed.accounting.items() if name != SERVED}
        return
    place = folder.step(closed.step)
    rollouts = pa.concat_tables(_tables(place, closed, "filter"))
    classes = group_classes(rollouts, _trained(place, closed))
    for table in _tables(place, closed, "sample"):
        columns = (table[name].to_pylist() for name in ("group_id", "dataset", "epoch"))
        for group, dataset, epoch in zip(*columns, strict=True):
            yield (dataset, epoch), {classes.get(group, "pending"): 1}


def _trained(place: str, closed: StepManifest) -> set[str] | None:
    """The groups in the batches of a step; None when the step had no optimizer."""
    if not any(entry["slot"].startswith("optimize-") for entry in closed.commits):
        return None
    batches = (table["group_id"].to_pylist() for table in _tables(place, closed, "optimize"))
    return {group for groups in batches for group in groups}


def _tables(place: str, closed: StepManifest, stage: str) -> list[pa.Table]:
    """The tables of one stage, found beside the manifest wherever the run was moved."""
    refs = [
        TableRef(**ref)
        for entry in closed.commits
        if entry["slot"].startswith(f"{stage}-")
        for ref in entry["tables"].values()
    ]
    return [
        read_table(TableRef(files.join(place, ref.uri.rsplit("/", 1)[-1]), ref.rows, ref.digest, ref.schema))
        for ref in refs
    ]


def _with_total(classes: Counter[str], share: Share) -> dict[str, int]:
    """With the prompts of a set that are set aside in every epoch, and those whose turn has not come."""
    aside = {"too_long": share.too_long, "malformed": share.bad_lines}
    counts = dict(sorted(classes.items())) | {name: count for name, count in aside.items() if count}
    pending = share.rows - sum(classes.values()) + classes["pending"]
    if pending:
        counts["pending"] = pending
    return {**counts, TOTAL: share.rows + sum(aside.values())}
