"""What the processes of a run log: a file each in `logs/` of its workspace, that is read while it grows.

A process writes a line a record, and a traceback below it. An SGLang server writes lines of its own, which are read
as far as they can be: its words say how bad something is. Nobody has to listen, and a process that dies leaves all
that it wrote.
"""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from milepost.storage.redaction import masked_text

LONGEST_BYTES = 16 * 1024 * 1024
"""Of a file; the one before is kept as `.log.1`."""

SAID = logging.getLogger("milepost.said")
"""What a person has been told on the terminal already, and is not told there again."""

STOPS = "the run stops: "
"""How the last word of a run begins that does not come to its end."""

_OWN = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Z]+) ([\w.-]+): (.*)", re.DOTALL)
_SGLANG = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] (.*)", re.DOTALL)
_BAD = re.compile(
    r"Traceback|[\w.]+(Error|Exception|Interrupt)\b|The above exception|During handling of"  # where a line begins
    r"|.{0,80}(hit an exception|SIGQUIT|sigquit|out of memory|Fatal Python error)",
    re.DOTALL,
)
_DOUBTFUL = re.compile(r"\bwarning\b", re.IGNORECASE)


@dataclass(frozen=True)
class Entry:
    """A record as it stands in a file. `time` is in Unix seconds, `level` is one of logging's numbers."""

    time: float
    level: int
    process: str
    logger: str
    message: str

    def __str__(self) -> str:
        stamp = datetime.fromtimestamp(self.time).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        return f"{stamp} {logging.getLevelName(self.level):<7} {self.process:<10} {self.message}"


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked_text(super().format(record))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


def log_handler(path: str) -> logging.Handler:
    """Appends to the file at `path`, which is made with its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=LONGEST_BYTES, backupCount=1, encoding="utf-8", errors="replace")
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def severity(text: str) -> int:
    """How bad a line is that does not say so itself, by its words."""
    if _BAD.match(text):
        return logging.ERROR
    return logging.WARNING if _DOUBTFUL.search(text) else logging.INFO


@dataclass
class _Reader:
    """One file, and how far it has been read."""

    path: Path
    offset: int = 0
    last: Entry | None = None

    @property
    def process(self) -> str:
        return self.path.name.removesuffix(".1").removesuffix(".log")

    def read(self) -> list[Entry]:
        """The records whose lines have ended since; one that went on with a traceback is complete."""
        found: list[Entry] = []
        for line in self._lines():
            entry = self._begin(line)
            if entry is None and found:
                found[-1] = replace(found[-1], message=f"{found[-1].message}\n{line}")
                continue
            self.last = entry or self._alone(line)
            found.append(self.last)
        return found

    def _lines(self) -> list[str]:
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, 2) < self.offset:  # begun again, by a new server or because it grew too long
                    self.offset = 0
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [line.rstrip(b"\r").decode(errors="replace") for line in whole.split(b"\n")[:-1]]

    def _begin(self, line: str) -> Entry | None:
        """The record that a line begins; None when it belongs to the one before."""
        if own := _OWN.fullmatch(line):
            at = datetime.fromisoformat(own[1]).timestamp()
            return Entry(at, logging.getLevelNamesMapping().get(own[2], logging.INFO), self.process, own[3], own[4])
        if told := _SGLANG.fullmatch(line):
            at = datetime.fromisoformat(told[1]).timestamp()
            return Entry(at, severity(told[2]), self.process, "", masked_text(told[2]))
        continues = (self.last is not None and self.last.logger) or not line.strip() or line[0].isspace()
        return None if continues else self._alone(line)

    def _alone(self, line: str) -> Entry:
        at = self.last.time if self.last else time.time()
        return Entry(at, severity(line), self.process, "", masked_text(line))


@dataclass
class Tail:
    """Every `.log` file of a folder as one stream; files that appear later are read too."""

    folder: str
    _readers: dict[str, _Reader] = field(default_factory=dict)

    def skip(self) -> None:
        """Leave out all that is there already."""
        for reader in self._all():
            reader.offset = reader.path.stat().st_size

    def read(self) -> list[Entry]:
        """What came since the last time, in order of time."""
        found = [entry for reader in self._all() for entry in reader.read()]
        return sorted(found, key=lambda entry: entry.time)

    def _all(self) -> Iterator[_Reader]:
        for path in sorted(Path(self.folder).glob("*.log")):
            yield self._readers.setdefault(path.name, _Reader(path))


def replaced(folder: str) -> list[Entry]:
    """What is in the files that others have taken the place of: of a server that died, or that grew too long."""
    return [entry for path in sorted(Path(folder).glob("*.log.1")) for entry in _Reader(path).read()]
