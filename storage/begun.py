"""What the weights that a run began with come from: another run, supervised fine-tuning, or a model from elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.storage import files, runs
from milepost.storage.parent import beside, course_of, parent_run, steps_before
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.taught import SFT_RECORD


@dataclass(frozen=True)
class Origin:
    """What weights come from: `kind` is `sft` with its record, `model` with its configuration's digest, or `run`;
    `import` is the file that the samples of a run were read from, with what it left open.
    """

    kind: str
    folder: str
    record: dict[str, Any]

    @property
    def name(self) -> str:
        """The end of its path; the last part alone is often just `model`."""
        return "/".join(self.folder.rstrip("/").split("/")[-2:])


def exported_from(model_folder: Path) -> tuple[RunFolder, int] | None:
    """The run whose exported weights a model folder is, and after how many steps; None for one from elsewhere."""
    run = model_folder.parent.parent
    is_export = model_folder.parent.name == "weights" and model_folder.name.isdigit() and (run / "run.json").exists()
    return (RunFolder(str(run), run.name), int(model_folder.name)) if is_export else None


def begun_with(folder: RunFolder, record: RunRecord) -> tuple[RunFolder, int] | None:
    """The run, and its version, whose weights a run began with; None when they were no run's.

    One that goes on from the first step of another began with what that began with; of a run that is gone, that is all
    that can be told: version 0.
    """
    parent = parent_run(record)
    if parent and steps_before(parent) and course_of(record).trains:
        before = beside(folder, parent.run)
        if parent.begin or not files.exists(before.record):
            return before, parent.begin
        return begun_with(before, runs.load(before))
    return exported_from(Path(record.model["folder"]))


def origin(model_folder: str) -> Origin:
    """What the weights in a model folder come from; of those of a run only its name, and after how many steps."""
    path = Path(model_folder)
    made = exported_from(path)
    if made and made[1]:
        return Origin("run", model_folder, {"run": made[0].run_id, "version": made[1]})
    if (record := path.parent / SFT_RECORD).exists():
        return Origin("sft", model_folder, files.read_json(str(record)))
    config = path / "config.json"
    digest = files.digest_of(config.read_bytes()) if config.exists() else ""
    return Origin("model", model_folder, {"config_digest": digest})
