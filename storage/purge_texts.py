"""The files of a run that are no tables: which of them have the words of a prompt, and what they are without."""

import html
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from milepost.storage import files
from milepost.storage.runs import RunFolder
from milepost.storage.text import to_json
from milepost.storage.tombstones import TOMBSTONE

Words = list[list[str]]
"""What each prompt says: its text, or that of its messages."""

_MODELS = ("checkpoints/", "weights/", "exports/")


@dataclass(frozen=True)
class TextPlan:
    """Files by their names in the run: those that are cleaned or written anew, and those with the words even then."""

    cleaned: list[str]
    left: list[str]


def plan(folder: RunFolder, words: Words, *, removed: Collection[str]) -> TextPlan:
    """What `clean` will do, and a new report after it; the files in `removed` go as a whole."""
    cleaned = {_name(folder, uri): data for uri, data in _cleaned(folder, words)}
    fresh = [_name(folder, folder.report)] if files.exists(folder.report) else []
    gone = {*fresh, *(_name(folder, uri) for uri in removed)}
    telling = [name for name in files_with(folder, words) if name not in gone | cleaned.keys()]
    still = [name for name, data in cleaned.items() if _says(data.decode(errors="replace"), words)]
    return TextPlan(sorted([*cleaned, *fresh]), sorted([*telling, *still]))


def clean(folder: RunFolder, words: Words) -> None:
    """Take the text of lines that have the words of a prompt out of logs, and out of malformed lines set aside."""
    for uri, data in _cleaned(folder, words):
        files.publish(uri, data, overwrite=True)


def files_with(folder: RunFolder, words: Words) -> list[str]:
    """The files of a run, but for tables and what a model is saved as, that have the words of a prompt."""
    fs, path = files.filesystem(folder.uri)
    inside = {str(found): str(found).removeprefix(path).lstrip("/") for found in fs.find(path)}
    looked = [found for found, name in inside.items() if not name.startswith(_MODELS) and not name.endswith(".parquet")]
    left = [inside[found] for found in looked if _says(fs.cat_file(found).decode(errors="replace"), words)]
    apart = [] if folder.workspace == folder.uri else _logs(folder)
    return sorted([*left, *(str(log) for log in apart if _says(log.read_bytes().decode(errors="replace"), words))])


def _name(folder: RunFolder, uri: str) -> str:
    """How a file is called; one that lies elsewhere by its whole path."""
    return uri.removeprefix(f"{folder.uri.rstrip('/')}/")


def _cleaned(folder: RunFolder, words: Words) -> Iterator[tuple[str, bytes]]:
    """Every file that has lines with the words, as it is without; there are as many lines as before."""
    uri = files.join(folder.uri, "quarantine.jsonl")
    if files.exists(uri):
        lines = [json.loads(line) for line in files.read(uri).decode().splitlines()]
        gone = {"text": TOMBSTONE, "reason": TOMBSTONE}
        left = [line | gone if _says(line["text"], words) else line for line in lines]
        if left != lines:
            yield uri, "".join(json.dumps(line) + "\n" for line in left).encode()
    for path in _logs(folder):
        said = path.read_bytes().decode(errors="surrogateescape").split("\n")
        kept = [TOMBSTONE if _says(line, words) else line for line in said]
        if kept != said:
            yield str(path), "\n".join(kept).encode(errors="surrogateescape")


def _logs(folder: RunFolder) -> list[Path]:
    """The logs of a run, also those that were replaced by others; they are local wherever the run is."""
    return sorted(path for path in Path(folder.logs).glob("*") if path.is_file())


def _says(text: str, words: Words) -> bool:
    """Whether a text has all that one of the prompts says: as it is, or as JSON or HTML write it."""
    return any(all(any(form in text for form in _forms(part)) for part in prompt) for prompt in words)


def _forms(text: str) -> set[str]:
    return {text, to_json(text)[1:-1], json.dumps(text)[1:-1], html.escape(text)}
