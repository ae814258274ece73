"""Weights that a spare engine is to evaluate, kept while the run goes on and removes its own exports.

They lie in `spare/` of the workspace under their digest, so that none is ever taken for another.
"""

import logging
from collections.abc import Collection, Sequence

from milepost.engines.protocols import TrainEngine, WeightHolder, WeightSource, WeightVersion
from milepost.storage import checkpoints, files
from milepost.storage.runs import RunFolder
from milepost.tasks.recover import restore_before
from milepost.tasks.sync import current_weights


def spare_folder(folder: RunFolder) -> RunFolder:
    """Where a run says which weights its spare engine is to hold: not those of its other engines."""
    return RunFolder(files.join(folder.workspace, "spare"), folder.run_id)


def held(folder: RunFolder, version: WeightVersion) -> WeightSource:
    """Weights where they are kept, whether they are or not."""
    name = f"{version.step:06d}-{version.digest[:12]}"
    return WeightSource(files.join(spare_folder(folder).uri, name), version)


def hold(folder: RunFolder, version: WeightVersion, holder: WeightHolder) -> WeightSource:
    """Keep the weights that `holder` has now: by links to their folder, or exported once more where they have none."""
    source, current = held(folder, version), current_weights(folder)
    if files.exists(source.uri):
        return source
    is_whole = current is not None and current.version == version and current.base is None
    if is_whole and current and files.exists(current.uri) and files.link_folder(current.uri, source.uri):
        return source
    if holder.export(source.uri, version) is None:
        files.remove_folder(source.uri)
        raise RuntimeError(f"weights {version} are to be evaluated, and their holder has others: this is a bug")
    return source


def hold_again(folder: RunFolder, wanted: Sequence[WeightVersion], trainer: TrainEngine | None) -> list[WeightVersion]:
    """Those of some earlier weights, in order, that are kept, or can be had from their checkpoint or a fresh `trainer`.

    The trainer has others afterwards. Whatever else was kept is removed.
    """
    release(folder, keep=wanted)
    saved = [0, *checkpoints.complete(folder, hashes=False)]
    for version in wanted:
        source = held(folder, version)
        if trainer is None or version.step not in saved or files.exists(source.uri):
            continue
        restore_before(folder, version.step, trainer)
        if (found := trainer.weights(source.uri, version.step).version) != version:
            files.remove_folder(source.uri)
            logging.getLogger(__name__).warning("checkpoint %d gives weights %s, not %s", version.step, found, version)
    return [version for version in wanted if files.exists(held(folder, version).uri)]


def release(folder: RunFolder, *, keep: Collection[WeightVersion] = ()) -> None:
    """Remove what is kept, but for some."""
    spare, names = spare_folder(folder).uri, {held(folder, version).uri for version in keep}
    for name in files.names(spare):
        if (uri := files.join(spare, name)) not in names:
            files.remove_folder(uri)
