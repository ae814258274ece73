"""Which weights somebody names: a model folder, a checkpoint's folder, or a run and how far it had come."""

from dataclasses import dataclass
from pathlib import Path

from milepost.engines.model_source import PACKAGE
from milepost.flows.best import saved_step
from milepost.flows.plan import model_folder
from milepost.flows.start import require_model
from milepost.storage import attempts, checkpoints, files, runs
from milepost.storage.begun import exported_from
from milepost.storage.evaluated import Evaluated, evaluated
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder
from milepost.storage.taught import last_step, model_of, taught
from milepost.storage.weight_version import WeightVersion

FORMS = "give a Hugging Face folder, a checkpoint's folder, RUN@STEP, RUN@latest, RUN@best or package:NAME"


@dataclass(frozen=True)
class Weights:
    """What somebody named. `model_dir` is the model that engines start with.

    Weights of a run have its folder and, when it trained them, their version: they are loaded into the engines then.
    """

    label: str
    model_dir: str
    run: RunFolder | None = None
    version: WeightVersion | None = None


def find_weights(text: str, root: str) -> Weights:
    """The weights called `text`; LookupError or ValueError says what there is instead."""
    if not text.startswith(PACKAGE):
        if _exists(text, checkpoints.MANIFEST):
            return _of_checkpoint(text)
        if "@" in text and not _exists(text):
            name, _, which = text.rpartition("@")
            return _of_run(runs.run_folder(root, name), which)
        if home := _run_at(text):
            raise _no_checkpoint(home, text, root)
        made = exported_from(Path(text).absolute())
        if made and made[1] in checkpoints.complete(made[0], hashes=False):
            return _of_run(made[0], str(made[1]))
        if not files.exists(text):
            raise _missing(text, root)
    return Weights(_stem(text), model_folder(text))


def _exists(text: str, name: str = "") -> bool:
    """Whether there is something called `text`, with `name` in it; LookupError when its store does not say."""
    try:
        return files.exists(files.join(text or ".", name) if name else text)
    except (ValueError, OSError):
        raise
    except Exception as error:  # each store has errors of its own
        raise LookupError(f"checkpoint {text!r} cannot be looked up: {error}") from error


def _run_at(text: str) -> RunFolder | None:
    """The run whose folder, or whose checkpoints' folder, is called `text`."""
    place = (text if "://" in text else str(Path(text).absolute())).rstrip("/")
    home = RunFolder(place.removesuffix("/checkpoints"), place.removesuffix("/checkpoints").rpartition("/")[2])
    return home if files.exists(home.record) else None


def _stem(text: str) -> str:
    return text.removeprefix(PACKAGE).rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def _missing(text: str, root: str) -> Exception:
    """A run of that name was meant, or one with nearly that name."""
    names = [folder.run_id for folder in runs.run_folders(root)]
    if text in names:
        return _no_checkpoint(runs.run_folder(root, text), text, root)
    return LookupError(f"checkpoint {text!r} does not exist{nearest(text, names) or ':'} {FORMS}")


def _no_checkpoint(folder: RunFolder, text: str, root: str) -> Exception:
    """A whole run was named as `text`: how to name one of its checkpoints."""
    if of := evaluated(attempts.current(folder)):
        return _of_evaluation(folder, of)
    name, said = folder.run_id, f"{text!r} is a run and no checkpoint"
    if runs.run_folder(root, name).uri == folder.uri:
        return LookupError(f"{said}: say how far, as {name}@latest, {name}@best or {name}@STEP")
    return LookupError(f"{said}: say how far, as the folder of a checkpoint such as {folder.checkpoint(1)}")


def _of_evaluation(folder: RunFolder, of: Evaluated) -> ValueError:
    named = of.label if of.run else of.place
    return ValueError(f"{folder.run_id!r} is an evaluation of {named} and has no checkpoints of its own: give {named}")


def _of_checkpoint(uri: str) -> Weights:
    """A checkpoint's folder, inside its run: how to read it is in the run's record."""
    version = checkpoints.load_manifest(uri).version
    place, _, name = (uri if "://" in uri else str(Path(uri).absolute())).rstrip("/").rpartition("/")
    home = place.rpartition("/")[0]
    folder = RunFolder(home, home.rpartition("/")[2])
    if not files.exists(folder.record) or folder.checkpoint(version.step).rpartition("/")[2] != name:
        raise ValueError(f"checkpoint {uri!r} is not inside its run, whose record it needs: give its place in the run")
    return _of_run(folder, str(version.step))


def _of_run(folder: RunFolder, which: str) -> Weights:
    record = attempts.current(folder)
    if of := evaluated(record):
        raise _of_evaluation(folder, of)
    if taught(record) and which != "0":
        return Weights(f"{folder.run_id}@{_only(folder, which)}", model_of(folder))
    saved = checkpoints.complete(folder, hashes=False)
    step = saved_step(folder, which, saved)
    require_model(record)
    label, model_dir = f"{folder.run_id}@{step}", str(record.model["folder"])
    version = checkpoints.load_manifest(folder.checkpoint(step)).version if step else None
    return Weights(label, model_dir, folder, version)


def _only(folder: RunFolder, which: str) -> int:
    """The step whose model a fine-tuning keeps."""
    last = last_step(folder)
    if which not in ("latest", "best", str(last)):
        raise LookupError(
            f"fine-tuning {folder.run_id!r} keeps the model of its last step: give {folder.run_id}@{last}"
        )
    return last
