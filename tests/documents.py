"""README.md and docs/ as their readers take them: the commands, each with where it stands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

PROGRAMS = ("milepost", "make", "prefect", "python", "pip", "ray", "kubectl", "git", "source", "export")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(milepost [a-z][^`]*)`")


@dataclass(frozen=True)
class Command:
    """A line of a block of commands, with its continuations and without its comment."""

    page: str
    line: int
    section: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"

    @property
    def program(self) -> str:
        return next(word for word in self.words if "=" not in word)

    @property
    def milepost(self) -> list[list[str]]:
        """What `milepost` is called with in it, also by another program."""
        starts = [at for at, word in enumerate(self.words) if word == "milepost"]
        return [list(self.words[at + 1 :]) for at in starts if at == 0 or self.words[at - 1] == "--" or self._alone(at)]

    def _alone(self, at: int) -> bool:
        return all("=" in word for word in self.words[:at])


def fenced(page: Path) -> Iterator[tuple[int, str, str, str]]:
    """Line, section, language and text of every fenced block."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        (*_, section) = ["", *re.findall(r"^## (.*)$", before, re.MULTILINE)]
        yield before.count("\n") + 2, section, found[1], found[2]


def commands(page: Path) -> Iterator[Command]:
    """Those of a page, in order. A block is one of commands when its first line begins with a known program."""
    for line, section, language, text in fenced(page):
        if language == "" and _begins(text.split()):
            for at, each in enumerate(text.replace("\\\n", "  ").splitlines()):
                if words := tuple(shlex.split(each, comments=True)):
                    yield Command(page.name, line + at, section, words)


def _begins(words: list[str]) -> bool:
    return next((word for word in words if "=" not in word), "") in PROGRAMS


def inline(page: Path) -> list[str]:
    """What prose calls `milepost` with."""
    return [found for line in page.read_text().splitlines() for found in _INLINE.findall(line)]


def block(page: Path, language: str) -> str:
    """The one block of a language."""
    (found,) = [text for _, _, name, text in fenced(page) if name == language]
    return found
