"""Exported weights of checkpoints, made for whoever evaluates them and kept for the next one.

They stay as long as their checkpoint does, and as an evaluation of them has not come to its end.
"""

import re
from collections.abc import Iterator

from milepost.storage import checkpoints, files, manifest, runs
from milepost.storage.evaluated import evaluated
from milepost.storage.runs import RunFolder
from milepost.storage.weight_version import WeightVersion

_NAME = re.compile(r"\d{6,}-[0-9a-f]{12}")


def _exports(folder: RunFolder) -> str:
    return files.join(folder.workspace, "exports")


def _name(version: WeightVersion) -> str:
    """The digest is in the name, so a stale one is never found."""
    return f"{version.step:06d}-{version.digest[:12]}"


def kept_export(folder: RunFolder, version: WeightVersion) -> str:
    """Where the exported weights of a version are kept, whether they are or not."""
    return files.join(_exports(folder), _name(version))


def remove_exports(folder: RunFolder) -> list[str]:
    """Remove those that nothing needs any more; returns their names."""
    names = {name for name in files.names(_exports(folder)) if _NAME.fullmatch(name)}
    saved = checkpoints.complete(folder, hashes=False) if names else []
    names -= {_name(checkpoints.load_manifest(folder.checkpoint(number)).version) for number in saved}
    names -= set(_evaluated(folder)) if names else set()  # which takes a look at every run
    for name in names:
        files.remove_folder(files.join(_exports(folder), name))
    return sorted(names)


def _evaluated(folder: RunFolder) -> Iterator[str]:
    """Those that evaluations beside the run are of and have not come to their end with."""
    for other in runs.run_folders(folder.uri.rstrip("/").rpartition("/")[0]):
        try:
            of = evaluated(runs.load(other))
        except (OSError, ValueError, LookupError, TypeError):  # nobody can go on with it
            continue
        if of and of.run == folder.run_id and of.version and not manifest.finished_steps(other):
            yield _name(WeightVersion.parse(of.version))
