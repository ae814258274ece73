"""`milepost lineage`: one question about where something comes from or went, answered from the run folders."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.tree import Tree

from milepost.storage import runs
from milepost.storage.ancestry import Ancestry, Origin, ancestry
from milepost.storage.registry import nearest
from milepost.storage.touches import Touch, run_folders, touches

_CHECKPOINT = re.compile(r"checkpoint:(?P<run>.+)@(?P<version>\d+)")
FORMS = "checkpoint:RUN@STEP, prompt:ID or sample:ID"
SHOWN = 12  # steps, or prompts, of a list on the terminal


@dataclass(frozen=True)
class Touched:
    """What was asked for, and every run that has it."""

    what: str
    runs: list[Touch]


def answer(what: str, root: str) -> Ancestry | Touched:
    """The ancestry of a checkpoint, or what a prompt or sample touched; ValueError for anything else."""
    if match := _CHECKPOINT.fullmatch(what):
        folder = runs.run_folder(root, match["run"])
        if folder.run_id not in (known := [found.run_id for found in run_folders(root)]):
            raise LookupError(f"no run {folder.run_id!r} in {root!r}{nearest(folder.run_id, known)}")
        return ancestry(folder, int(match["version"]))
    kind, colon, name = what.partition(":")
    if colon and name and kind == "prompt":
        return Touched(what, touches(root, "prompt", name))
    if colon and name and kind == "sample":
        return Touched(what, touches(root, "sample", name))
    raise ValueError(f"{what!r} is nothing that has a lineage: give {FORMS}")


def as_json(found: Ancestry | Touched) -> dict[str, Any]:
    return asdict(found)


def show(found: Ancestry | Touched) -> None:
    """The answer as a tree."""
    Console(highlight=False).print(_touched(found) if isinstance(found, Touched) else _ancestry(found))


def _ancestry(found: Ancestry) -> Tree:
    tree = Tree(f"[bold]checkpoint {found.run}@{found.version.partition('-')[0]}[/]  {found.uri}")
    tree.add(f"weights {found.version}; {found.state}")
    steps = tree.add(f"{len(found.steps)} steps, {sum(len(step.tables) for step in found.steps)} tables")
    for step in _ends(found.steps):
        if step is None:
            steps.add("...")
            continue
        graders = ", ".join(step.graders) or "none"
        steps.add(f"step {step.step}: manifest {step.manifest[:12]}, attempt {step.attempt}, graders {graders}")
    prompts = tree.add(f"{len(found.prompts)} prompts of {', '.join(sorted({item.dataset for item in found.prompts}))}")
    for prompt in _ends(found.prompts):
        prompts.add("..." if prompt is None else f"{prompt.prompt_id}: row {prompt.row}, steps {_listed(prompt.steps)}")
    for attempt in found.attempts:
        changed = f", changed {', '.join(attempt.changes)}" if attempt.changes else ""
        code = f"commit {attempt.commit[:12] or 'unknown'}{' with a diff' if attempt.diff_digest else ''}"
        digests = f"packages {attempt.packages_digest[:12]}, parameters {attempt.parameters_digest[:12]}"
        tree.add(f"attempt {attempt.number}: {code}, {digests}{changed}")
    if isinstance(found.parent, Ancestry):
        tree.children.append(_ancestry(found.parent))
    else:
        tree.add(_origin(found.parent))
    return tree


def _origin(found: Origin) -> str:
    if found.kind == "sft":
        return f"supervised fine-tuning of {found.record['model']} in {found.record['steps']} steps: {found.folder}"
    return f"model {found.folder}"


def _ends(items: list[Any]) -> list[Any]:
    """All items, or the first and last of many with None between them."""
    half = SHOWN // 2
    return items if len(items) <= SHOWN else [*items[:half], None, *items[-half:]]


def _listed(steps: list[int]) -> str:
    return ", ".join("..." if step is None else str(step) for step in _ends(steps))


def _touched(found: Touched) -> Tree:
    tree = Tree(f"[bold]{found.what}[/]")
    for touch in found.runs:
        begun = f", which began with {touch.parent}" if touch.inherited else ""
        branch = tree.add(f"run {touch.run}{begun}")
        if touch.served:
            branch.add(f"served in steps {_listed(touch.served)}: {len(touch.samples)} samples")
            branch.add(f"trained on in steps {_listed(touch.trained)}" if touch.trained else "never trained on")
        branch.add(f"{len(touch.checkpoints)} checkpoints hold it")
        for uri in _ends(touch.checkpoints):
            branch.add(uri or "...")
    return tree


def mermaid(found: Ancestry | Touched) -> str:
    """The answer as a Mermaid flow chart, from what came first."""
    edges = _touch_edges(found) if isinstance(found, Touched) else _ancestry_edges(found)
    names = list(dict.fromkeys(name for edge in edges for name in edge))
    lines = [f'    n{at}["{name.replace(chr(34), chr(39))}"]' for at, name in enumerate(names)]
    arrows = [f"    n{names.index(begin)} --> n{names.index(end)}" for begin, end in edges]
    return "\n".join(["flowchart LR", *lines, *arrows])


def _ancestry_edges(found: Ancestry) -> list[tuple[str, str]]:
    if isinstance(found.parent, Ancestry):
        edges, before = _ancestry_edges(found.parent), _checkpoint_name(found.parent)
    else:
        before = f"{found.parent.kind}: {found.parent.folder.rstrip('/').rpartition('/')[2]}"
        edges = []
    data = f"prompts: {', '.join(sorted({item.dataset for item in found.prompts}))}"
    for step in _ends(found.steps):
        name = f"{found.run}: ..." if step is None else f"{found.run}: step {step.step}"
        edges += [(before, name)] + ([] if step is None else [(data, name)])
        before = name
    return [*edges, (before, _checkpoint_name(found))]


def _checkpoint_name(found: Ancestry) -> str:
    number, _, digest = found.version.partition("-")
    return f"{found.run}@{number} ({digest[:8]})"


def _touch_edges(found: Touched) -> list[tuple[str, str]]:
    edges = []
    for touch in found.runs:
        run = f"run {touch.run}"
        edges.append((f"run {touch.parent.partition('@')[0]}" if touch.inherited else found.what, run))
        edges += [(run, uri.rstrip("/").rpartition("/")[2]) for uri in touch.checkpoints]
    return edges
