"""`milepost purge`: prompts taken out of stored runs, with everything that tells what they said."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from milepost.flows.evaluation_results import is_evaluation
from milepost.flows.report_delivery import report_now
from milepost.storage import attempts, files, purge, purge_texts, purges, runs
from milepost.storage.lease import hold
from milepost.storage.purge import Finding
from milepost.storage.purge_texts import Words
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder
from milepost.storage.taught import came_of, go_on_with, taught
from milepost.tasks.recover import needed_tables


@dataclass(frozen=True)
class Purged:
    """What a purge did, or would do, in one run.

    `cleaned` are the files that are no tables and lose the words of a prompt, or are written anew without them, `left`
    those that have them even then; `sources` are the files that the run's prompts were read from.
    """

    run: str
    prompts: list[str]
    tables: list[str] = field(default_factory=list)
    rows: int = 0
    cleaned: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def holders(folders: Iterable[RunFolder], prompts: Collection[str]) -> dict[RunFolder, set[str]]:
    """The runs that have some of the prompts, and which. LookupError for a prompt that none of them has.

    An id tells a prompt with its label from the same words with another; a purge is of the words.
    """
    said = {folder: purge.said(folder) for folder in folders}
    every = set().union(*said.values())
    if lacking := [prompt for prompt in prompts if prompt not in every]:
        names = ", ".join(folder.run_id for folder in said)
        raise LookupError(f"no prompt {lacking[0]!r} in {names}{nearest(lacking[0], sorted(every))}")
    words = {found[prompt] for found in said.values() for prompt in prompts if found.get(prompt)}
    holding = {
        folder: {id for id, says in found.items() if id in prompts or says in words} for folder, found in said.items()
    }
    return {folder: ids for folder, ids in holding.items() if ids}


def others_with(root: str, chosen: Collection[RunFolder], prompts: Collection[str]) -> list[str]:
    """Runs of `root` that are not `chosen` and tell what one of the prompts says; to be asked before it is purged."""
    holding = holders([*chosen, *(folder for folder in runs.run_folders(root) if folder not in chosen)], prompts)
    left = {folder: ids - purges.purged_prompts(folder.uri).keys() for folder, ids in holding.items()}
    return [folder.run_id for folder, ids in left.items() if ids and folder not in chosen]


def purge_runs(
    root: str, chosen: Mapping[RunFolder, Collection[str]], *, reason: str, force: bool, dry_run: bool
) -> list[Purged]:
    """`purge_run` for each; nothing is purged when one of them is refused."""
    if not force:
        for folder, prompts in chosen.items():
            _require_not_needed(folder, _find(folder, prompts))
    return [
        purge_run(root, folder, prompts, reason=reason, force=force, dry_run=dry_run)
        for folder, prompts in chosen.items()
    ]


def purge_run(
    root: str,
    folder: RunFolder,
    prompts: Collection[str],
    *,
    reason: str = "",
    force: bool = False,
    dry_run: bool = False,
) -> Purged:
    """Replace what a run has of `prompts` by tombstones; one that was killed half-way is finished with it.

    LeaseHeld while somebody works on the run. Unless with `force`, what the run needs to go on is not taken from it.
    """
    if dry_run:
        found = _find(folder, prompts)
        return _planned(folder, found, purge.words(folder, found))
    with hold(folder):
        found = _find(folder, prompts)
        if not force:
            _require_not_needed(folder, found)
        words = purge.words(folder, found)
        planned = _planned(folder, found, words)
        if found.tables:
            purges.publish(folder.uri, found.prompts, found.tables, reason=reason)
        purge_texts.clean(folder, words)
        purge.replace_tables(folder, found)
        purge.remove_leftovers(folder)
    if files.exists(folder.report):
        report_now(root, folder.run_id)
    purges.finish(folder.uri)
    return replace(planned, left=purge_texts.files_with(folder, words))


def _find(folder: RunFolder, prompts: Collection[str]) -> Finding:
    begun = {prompt for killed in purges.unfinished(folder.uri) for prompt in killed.prompts}
    return purge.find(folder, {*prompts, *begun})


def _require_not_needed(folder: RunFolder, found: Finding) -> None:
    """ValueError names the first step whose stored tables the run would need to go on."""
    if taught(runs.load(folder)):
        if came_of(folder) is None:
            raise ValueError(
                f"fine-tuning {folder.run_id!r} has not ended and would write these prompts once more: end it by "
                f"{go_on_with(folder)}, or give --force"
            )
        return
    trains = attempts.current(folder).parameters.engines.train != "none"
    needed = {purges.run_and_file(ref.uri)[1] for ref in needed_tables(folder, trained=trains)}
    steps = sorted({table.file.split("/")[1] for table in found.tables if table.file in needed})
    if steps:
        raise ValueError(
            f"run {folder.run_id!r} needs what step {int(steps[0])} has of these prompts to go on, because no "
            f"checkpoint after it is stored: `milepost resume {folder.run_id}` until one is, or give --force to end it"
        )


def _planned(folder: RunFolder, found: Finding, words: Words) -> Purged:
    texts = purge_texts.plan(folder, words, removed=purge.leftovers(folder))
    return Purged(
        run=folder.run_id,
        prompts=sorted(found.prompts),
        tables=[table.file for table in found.tables],
        rows=sum(table.rows for table in found.tables),
        cleaned=texts.cleaned,
        left=texts.left,
        sources=_sources(folder),
    )


def _sources(folder: RunFolder) -> list[str]:
    """The files that the prompts were read from: those of an evaluation are those of its sets."""
    record = attempts.current(folder)
    if learns := taught(record):
        return [learns.file]
    parameters = record.parameters.model_dump(mode="json")
    held_out = [parameters["eval"]["path"], *(item["path"] for item in parameters["eval"]["sets"])]
    data = parameters["data"]
    trained = [data["path"], *(item["path"] for item in data["sets"])]
    given = held_out if is_evaluation(folder) else [*trained, *held_out]
    return [path for path in dict.fromkeys(given) if path]


def show(found: list[Purged], others: list[str], *, dry_run: bool) -> None:
    """A line a run, and what is left for a person to do."""
    for one in found:
        did = "would replace" if dry_run else "replaced"
        print(f"{one.run}: {did} {one.rows} rows in {len(one.tables)} tables by tombstones")
        if one.cleaned:
            print(f"{one.run}: {'would rewrite' if dry_run else 'rewrote'} {', '.join(one.cleaned)} without them")
        for uri in one.left:
            print(f"not touched: {uri} has the words of a prompt, remove it if you do not need it")
    for path in dict.fromkeys(path for one in found for path in one.sources):
        print(f"not touched: {path} is yours, remove the rows there")
    if others:
        print(f"not touched: one of these prompts is in {', '.join(others)} too, name them by --runs PATTERN")


def as_json(found: list[Purged], others: list[str], *, dry_run: bool) -> dict[str, object]:
    return {"dry_run": dry_run, "runs": [asdict(one) for one in found], "others": others}
