"""Which samples are too old to be trained on: weights of too many steps ago have made a token of theirs."""

from milepost.storage.journal import Slot, StepStore
from milepost.storage.parent import taken_from
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.generate import Shard


def oldest_version(store: StepStore, shard: Shard, *, version: str, max_staleness: int | None) -> int | None:
    """The trained steps of the oldest weights whose tokens are not stale in a shard; None where no token is.

    `version` names the weights that the step begins with. Samples that come from another run are as old as they were
    there, and those that were made elsewhere are of no known age.
    """
    if max_staleness is None:
        return None
    generated = store.stored(Slot("generate", shard.round, shard.index))
    taken = taken_from(generated.record) if generated else None
    current = taken.version if taken else version
    return WeightVersion.parse(current).step - max_staleness if current else None
