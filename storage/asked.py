"""Evaluations that are asked of a run that trains: a file each in `asked/` of the run, which answers between two steps.

The answer is the evaluation itself, a run folder beside the run. A file stays until then, whoever dies meanwhile.
"""

from dataclasses import asdict, dataclass

import pyarrow as pa

from milepost.storage import files
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef, write_table


@dataclass(frozen=True)
class Asked:
    """An evaluation called `run`, of the weights that a run has when it comes to it."""

    run: str
    parameters: Parameters
    prompts: TableRef


def _folder(folder: RunFolder) -> str:
    return files.join(folder.uri, "asked")


def _uri(folder: RunFolder, run: str) -> str:
    return files.join(_folder(folder), f"{run}.json")


def _refusal(folder: RunFolder, run: str) -> str:
    return files.join(_folder(folder), "refused", f"{run}.json")


def ask(folder: RunFolder, run: str, parameters: Parameters, prompts: pa.Table) -> None:
    """Ask a run for an evaluation, once more if it was before."""
    _remove(_refusal(folder, run))
    ref = write_table(files.join(_folder(folder), run), prompts, PROMPTS)
    content = asdict(Asked(run, parameters, ref)) | {"parameters": parameters.model_dump(mode="json")}
    files.publish_json(_uri(folder, run), content, overwrite=True)


def asked(folder: RunFolder) -> list[str]:
    """The names of the evaluations that a run is asked for."""
    return [name.removesuffix(".json") for name in files.names(_folder(folder)) if name.endswith(".json")]


def read(folder: RunFolder, run: str) -> Asked:
    """What a run is asked for under a name."""
    content = files.read_json(_uri(folder, run))
    prompts = TableRef(**files.moved(content["prompts"], _folder(folder)))
    return Asked(**content | {"parameters": Parameters.model_validate(content["parameters"]), "prompts": prompts})


def settle(folder: RunFolder, run: str, refusal: str = "") -> None:
    """It is answered, or refused for a reason: nothing of what was asked stays."""
    if refusal:
        files.publish_json(_refusal(folder, run), {"reason": refusal}, overwrite=True)
    _remove(_uri(folder, run))
    for name in files.names(_folder(folder)):
        if name.endswith(".parquet") and name.rpartition("-")[0] == run:
            _remove(files.join(_folder(folder), name))


def refused(folder: RunFolder, run: str) -> str:
    """Why a run could not make an evaluation; empty when nothing was refused."""
    uri = _refusal(folder, run)
    return str(files.read_json(uri)["reason"]) if files.exists(uri) else ""


def _remove(uri: str) -> None:
    fs, path = files.filesystem(uri)
    if fs.exists(path):
        fs.rm_file(path)
