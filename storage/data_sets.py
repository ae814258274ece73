"""The prompt sets of a run: one, or several with weights, each under a name that no other has."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from milepost.storage.parameters import DataSection, DataSet
from milepost.storage.prompt_source import EXTENSIONS, parse_path
from milepost.storage.redaction import masked_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OWN = ("system_prompt", "input_key", "label_key", "metadata_key", "tools_key")


@dataclass(frozen=True)
class Source:
    """One set to read: by the keys of `data`, whose `path` is the set's. `reward` is its own, if it has one."""

    name: str
    data: DataSection
    reward: str = ""
    weight: float = 1.0


def sources(data: DataSection) -> list[Source]:
    """Every set of a data section; ValueError for those that cannot be used together."""
    if not data.sets:
        return [Source(dataset_name(parse_path(data.path)[0]), data)]
    if data.path:
        raise ValueError(
            f"data.path is {masked_text(data.path)!r} and data.sets has prompt sets, too: put it among them, or set "
            "data.path to nothing"
        )
    found = [_source(data, item) for item in data.sets]
    check_names([(source.name, source.data.path) for source in found], "its 'name' in data.sets")
    return found


def _source(data: DataSection, item: DataSet) -> Source:
    own = {field: getattr(item, field) for field in _OWN if getattr(item, field)}
    name = item.name or dataset_name(parse_path(item.path)[0])
    return Source(name, data.model_copy(update={"path": item.path, **own}), item.reward, item.weight)


def dataset_name(uri: str) -> str:
    """The base name of a prompt file, without its extension."""
    name = masked_text(uri).rstrip("/").rsplit("/", 1)[-1]
    for extension in sorted(EXTENSIONS, key=len, reverse=True):
        name = name.removesuffix(extension)
    return name


def check_names(named: Iterable[tuple[str, str]], how: str) -> None:
    """ValueError for the first (name, path) whose name is taken or cannot be one; `how` says where a name is given."""
    seen: dict[str, str] = {}
    for name, path in named:
        if not path:
            raise ValueError(f"{f'data set {name!r}' if name else 'a data set'} has no file: give its path")
        if not _NAME.fullmatch(name):
            made = name == dataset_name(parse_path(path)[0])
            whose = f", which is that of its file {masked_text(path)!r}," if made else ""
            raise ValueError(
                f"data set name {name!r}{whose} cannot be used: give {how} with letters, digits, '.', '_' and '-'"
            )
        if name in seen:
            raise ValueError(f"{seen[name]} and {path} are both called {name!r}: give one another name, as {how}")
        seen[name] = path
