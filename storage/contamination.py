"""Which prompts of one set stand in another: by their whole normalised text, or by 13 words in a row.

Normalised text is Unicode NFKC, case folded, its words with single spaces between them: punctuation and layout do not
count. A word is a run of letters and digits, a Chinese or Japanese character, or a sign of arithmetic before a digit.
Of a dialogue the last message of the user is compared: system messages and solved examples are alike on purpose.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from milepost.storage.text import encodable

NGRAM = 13

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_SIGN = r"[-+*/=<>^%\u2212\u00d7\u00f7](?=\s*\d)"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\W_{_IDEOGRAPH}]+|{_SIGN}")
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(NGRAM)], dtype=np.uint64)

Hashes = npt.NDArray[np.uint64]


def asked(prompt: Any) -> str:
    """What a prompt, a string or messages, asks: its last message of the user, or all there is without one."""
    if isinstance(prompt, str):
        return prompt
    texts = [(message["role"], _text(message.get("content"))) for message in prompt]
    users = [text for role, text in texts if role == "user"]
    return users[-1] if users else "\n".join(text for _, text in texts)


def _text(content: Any) -> str:
    """The text of a message; of a list of parts that of those which have any."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", encodable(text)).casefold())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


_word_hash = lru_cache(maxsize=2**18)(_hash)


def whole_hash(found: list[str]) -> int:
    """Of a whole normalised text."""
    return _hash(" ".join(found))


def ngram_hashes(found: list[str]) -> Hashes:
    """Of every 13 words in a row; none for a text of fewer."""
    if len(found) < NGRAM:
        return np.empty(0, np.uint64)
    hashes = np.array([_word_hash(word) for word in found], dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(hashes, NGRAM)
    ngrams: Hashes = (windows * _FACTORS).sum(axis=1, dtype=np.uint64)  # modulo 2**64
    return ngrams


@dataclass(frozen=True)
class Index:
    """The texts of a set, to look others up in: its rows by whole text, and by n-grams, which are sorted."""

    rows: dict[int, int]
    ngrams: Hashes
    owners: npt.NDArray[np.int64]

    def same(self, found: list[str]) -> int | None:
        """The first row whose text is this one; a text without words is nowhere."""
        return self.rows.get(whole_hash(found)) if found else None

    def shares(self, found: list[str]) -> int | None:
        """A row that has 13 words in a row with this text."""
        hashes = ngram_hashes(found)
        places = np.searchsorted(self.ngrams, hashes)
        inside = places < len(self.ngrams)
        places, hashes = places[inside], hashes[inside]
        hits = places[self.ngrams[places] == hashes]
        return int(self.owners[hits[0]]) if len(hits) else None


def index(texts: Iterable[tuple[int, str]]) -> Index:
    """Of rows with their texts."""
    rows: dict[int, int] = {}
    ngrams, owners = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for row, text in texts:
        if found := words(text):
            rows.setdefault(whole_hash(found), row)
            ngrams.append(np.unique(ngram_hashes(found)))
            owners.append(np.full(len(ngrams[-1]), row, np.int64))
    different, first = np.unique(np.concatenate(ngrams), return_index=True)
    return Index(rows, different, np.concatenate(owners)[first])
