"""Whether a run was ended by a rule of its own, from what it has stored."""

from milepost.engines.gpu_placement import slots
from milepost.flows.results import finished, held_out
from milepost.storage import attempts, manifest, stops
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.stops import Stop
from milepost.tasks.watched import History, broken_rule


def gpus(parameters: Parameters) -> int:
    """What a second of a step counts for."""
    return max(1, slots(parameters).count)


def history(folder: RunFolder) -> History:
    """A run as it is stored."""
    taken = {number: gpus(parameters) for number, parameters in attempts.all_parameters(folder).items()}
    return History(finished(folder), held_out(folder), taken)


def stopped(folder: RunFolder, parameters: Parameters) -> Stop | None:
    """The stop at which a run stands, when these parameters would have it stop there again."""
    found = stops.stop_after(folder, len(manifest.finished_steps(folder)))
    return found if found and broken_rule(parameters.stop, history(folder)) else None
