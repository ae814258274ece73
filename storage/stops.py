"""Where a rule ended a run before its last step: `stops/N.json`, written once the run has a checkpoint of N steps."""

from dataclasses import asdict, dataclass

from milepost.storage import files
from milepost.storage.runs import RunFolder


@dataclass(frozen=True)
class Stop:
    """Why a run ended after so many finished steps.

    `rule` is its parameter, as in `stop.max_tokens`, `attempt` the one that it ended; `saved` is whether the weights
    have a checkpoint, as those of a run that trains do.
    """

    after: int
    rule: str
    reason: str
    attempt: int
    saved: bool


def _uri(folder: RunFolder, after: int) -> str:
    return files.join(folder.uri, "stops", f"{after:06d}.json")


def publish(folder: RunFolder, stop: Stop) -> None:
    """Again when it is: a run that goes on may be stopped at the same step by another rule."""
    files.publish_json(_uri(folder, stop.after), asdict(stop), overwrite=True)


def stop_after(folder: RunFolder, after: int) -> Stop | None:
    """The stop that was recorded at a step; the run may have gone on since."""
    uri = _uri(folder, after)
    return Stop(**files.read_json(uri)) if files.exists(uri) else None


def stops(folder: RunFolder) -> list[Stop]:
    """Every stop of a run, in order."""
    place = files.join(folder.uri, "stops")
    return [Stop(**files.read_json(files.join(place, name))) for name in files.names(place)]


def has_saved(folder: RunFolder, after: int) -> bool:
    """Whether a stop left a checkpoint, which the manifest of the step before it cannot name."""
    found = stop_after(folder, after)
    return found is not None and found.saved
