"""What the router knows of a request when it chooses an engine for it."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ROUTING_KEYS = (b"x-smg-routing-key", b"x-session-id")
EXACT_VERSION = b"x-milepost-weight-version"
LEAST_VERSION = b"x-milepost-min-weight-version"
CHARACTERS_A_TOKEN = 4  # of a prompt that comes as text: only loads are compared by it

_STEP = re.compile(r"(\d+)(-|$)")


class BadDemand(ValueError):
    """A header asks for weights in words that the router does not understand."""


@dataclass(frozen=True)
class Demand:
    """The weights that a request insists on: an exact version, or those of at least so many steps."""

    exact: str | None = None
    least: int | None = None

    def met_by(self, version: str | None) -> bool:
        if self.exact is not None and version != self.exact:
            return False
        if self.least is None:
            return True
        step = _STEP.match(version or "")
        return step is not None and int(step[1]) >= self.least

    def __str__(self) -> str:
        wanted = [f"weights {self.exact}"] if self.exact is not None else []
        wanted += [f"weights of step {self.least} or later"] if self.least is not None else []
        return " and ".join(wanted) or "any weights"


ANY_WEIGHTS = Demand()


@dataclass
class Asked:
    """A request. `body` is all of it where the policy reads prompts, and empty else."""

    key: str = ""
    demand: Demand = ANY_WEIGHTS
    body: bytes = b""

    @cached_property
    def _json(self) -> dict[str, Any]:
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def prompt(self) -> list[int] | str:
        """Token ids, or text where they are not given; messages are as their JSON. Empty for what is no prompt."""
        ids = self._json.get("input_ids")
        if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            return ids
        for name in ("text", "prompt"):
            if isinstance(self._json.get(name), str):
                return str(self._json[name])
        messages = self._json.get("messages")
        return json.dumps(messages) if messages else ""

    @cached_property
    def tokens(self) -> int:
        """Roughly what the request takes of an engine: its prompt, and the longest answer that it allows."""
        prompt = self.prompt
        length = len(prompt) if isinstance(prompt, list) else len(prompt) // CHARACTERS_A_TOKEN
        params = self._json.get("sampling_params")
        limits = [self._json, params if isinstance(params, dict) else {}]
        names = ("max_new_tokens", "max_tokens", "max_completion_tokens")
        longest = [found[name] for found in limits for name in names if isinstance(found.get(name), int)]
        return length + max(longest, default=0)


def asked_of(headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> Asked:
    """What `headers`, whose names are in lower case, and `body` say; BadDemand when they cannot be understood."""
    found = dict(headers)
    key = next((found[name].decode("latin-1") for name in ROUTING_KEYS if found.get(name)), "")
    exact, least = found.get(EXACT_VERSION, b"").decode("latin-1"), found.get(LEAST_VERSION, b"").decode("latin-1")
    if least and not least.isdecimal():
        raise BadDemand(f"{LEAST_VERSION.decode()} is {least!r}, it must be a number of steps such as 12")
    if not exact and not least:
        return Asked(key, ANY_WEIGHTS, body)
    return Asked(key, Demand(exact or None, int(least) if least else None), body)
