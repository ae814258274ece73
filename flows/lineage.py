"""`milepost lineage`: one question about where something comes from or went, answered from the run folders."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.tree import Tree

from milepost.flows.best import saved_step
from milepost.storage import checkpoints, runs
from milepost.storage.ancestry import Ancestry, PromptLink, ancestry
from milepost.storage.begun import Origin
from milepost.storage.origin import origin_of
from milepost.storage.parent import course_of
from milepost.storage.taught import TAUGHT, last_step, taught
from milepost.storage.touches import Touch, touches

_CHECKPOINT = re.compile(r"checkpoint:(?P<run>.+)@(?P<version>[0-9]+|best|latest)")
FORMS = "checkpoint:RUN@STEP, checkpoint:RUN@best, prompt:ID, sample:ID or sample:RUN/ID"
SHOWN = 12  # steps, or prompts, of a list on the terminal


@dataclass(frozen=True)
class Touched:
    """What was asked for, and every run that has it; `note` says what the answer alone may hide."""

    what: str
    runs: list[Touch]
    note: str = ""


def answer(what: str, root: str) -> Ancestry | Touched:
    """The ancestry of a checkpoint, or what a prompt or sample touched; ValueError for anything else."""
    if match := _CHECKPOINT.fullmatch(what):
        folder = runs.run_folder(root, match["run"])
        record = runs.load(folder)
        if not course_of(record).trains and not origin_of(record):
            raise LookupError(
                f"run {folder.run_id!r} trains nothing and has no checkpoint: ask for prompt:ID or sample:ID"
            )
        which = match["version"]
        if taught(record) and not which.isdigit():
            which = str(last_step(folder))
        saved = [] if which.isdigit() else checkpoints.complete(folder, hashes=False)
        return ancestry(folder, int(which) if which.isdigit() else saved_step(folder, which, saved))
    kind, colon, name = what.partition(":")
    if colon and name and kind == "prompt":
        return Touched(what, touches(root, "prompt", name))
    if colon and name and kind == "sample":
        return _of_sample(what, name, root)
    raise ValueError(f"{what!r} is nothing that has a lineage: give {FORMS}")


def _of_sample(what: str, name: str, root: str) -> Touched:
    """Runs number their samples alike: an id names one sample in each of them."""
    run, slash, own = name.partition("/")
    if slash and run in [folder.run_id for folder in runs.run_folders(root)]:
        return Touched(what, touches(root, "sample", own, run=run))
    found = touches(root, "sample", name)
    made = [touch.run for touch in found if touch.served]
    note = "each run has a sample of its own under this id, unless it has taken the stages of another run"
    return Touched(what, found, f"{note}: ask for one as sample:{made[0]}/{name}" if len(made) > 1 else "")


def as_json(found: Ancestry | Touched) -> dict[str, Any]:
    return asdict(found)


def show(found: Ancestry | Touched) -> None:
    """The answer as a tree."""
    Console(highlight=False).print(_touched(found) if isinstance(found, Touched) else _ancestry(found))


def _ancestry(found: Ancestry) -> Tree:
    title = f"checkpoint {found.run}@{found.version.partition('-')[0]}" if found.version else f"samples of {found.run}"
    tree = Tree(f"[bold]{title}[/]  {found.uri if found.version else ''}")
    tree.add(f"weights {found.version}; {found.state}" if found.version else found.state)
    steps = tree.add(f"{len(found.steps)} steps, {sum(len(step.tables) for step in found.steps)} tables")
    for step in ends(found.steps):
        if step is None:
            steps.add("...")
            continue
        graders = ", ".join(step.graders) or "none"
        steps.add(f"step {step.step}: manifest {step.manifest[:12]}, attempt {step.attempt}, graders {graders}")
    _prompts(tree.add(_of_data(found)), found.prompts)
    for attempt in found.attempts:
        changed = f", changed {', '.join(attempt.changes)}" if attempt.changes else ""
        code = f"commit {attempt.commit[:12] or 'unknown'}{' with a diff' if attempt.diff_digest else ''}"
        digests = f"packages {attempt.packages_digest[:12]}, parameters {attempt.parameters_digest[:12]}"
        tree.add(f"attempt {attempt.number}: {code}, {digests}{changed}")
    if found.source:
        taken = [step.taken for step in found.steps if step.taken]
        branch = tree.add(f"stored by {taken[0]['run']}: steps {_listed([item['step'] for item in taken])}")
        branch.children.append(_ancestry(found.source)) if isinstance(found.source, Ancestry) else branch.add(
            _origin(found.source)
        )
    if isinstance(found.parent, Ancestry):
        tree.children.append(_ancestry(found.parent))
    else:
        tree.add(_origin(found.parent))
    return tree


def _of_data(found: Ancestry) -> str:
    """Where the prompts come from."""
    if learns := found.data.get(TAUGHT):
        return f"learnt {learns['rows'] - learns['too_long']} rows of {learns['file']} ({learns['digest'][:12]})"
    return f"{len(found.prompts)} prompts of {', '.join(sorted({item.dataset for item in found.prompts}))}"


def _prompts(branch: Tree, taken: list[PromptLink]) -> None:
    for prompt in ends(taken):
        if prompt is None:
            branch.add("...")
            continue
        row = "" if prompt.row is None else f"row {prompt.row}, "
        branch.add(f"{prompt.prompt_id}: {row}steps {_listed(prompt.steps)}")


def _origin(found: Origin) -> str:
    if found.kind == "sft":
        return f"supervised fine-tuning of {found.record['model']} in {found.record['steps']} steps: {found.folder}"
    if found.kind == "import":
        return f"samples of {found.folder} ({found.record['digest'][:12]}), {found.record['rows']} rows"
    return f"model {found.folder}"


def ends(items: list[Any]) -> list[Any]:
    """All items, or the first and last of many with None between them."""
    half = SHOWN // 2
    return items if len(items) <= SHOWN else [*items[:half], None, *items[-half:]]


def _listed(steps: list[int]) -> str:
    return ", ".join("..." if step is None else str(step) for step in ends(steps))


def _touched(found: Touched) -> Tree:
    tree = Tree(f"[bold]{found.what}[/]")
    if found.note:
        tree.add(found.note)
    for touch in found.runs:
        begun = f", which began with {touch.parent}" if touch.inherited else ""
        branch = tree.add(f"run {touch.run}{begun}")
        if touch.served:
            branch.add(f"served in steps {_listed(touch.served)}: {len(touch.samples)} samples")
            branch.add(f"trained on in steps {_listed(touch.trained)}" if touch.trained else "never trained on")
        if touch.purged:
            branch.add(f"purged on {touch.purged}: the run does not tell any more what it said")
        branch.add(f"{len(touch.checkpoints)} checkpoints hold it")
        for uri in ends(touch.checkpoints):
            branch.add(uri or "...")
    return tree
