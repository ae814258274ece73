"""What a reward function is given, and what it says: both are plain records that travel as JSON."""

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One response to score. `prompt` is a string or a list of messages; `label` is the prompt set's JSON value.

    Where no engine has generated it, as on the command line, nothing is known of its tokens: `response_tokens` and
    `finish_reason` are None, `sample_id` and `group_id` empty.
    """

    prompt: Any
    response: str
    label: Any
    metadata: dict[str, Any]
    response_tokens: int | None = None
    finish_reason: str | None = None
    sample_id: str = ""
    group_id: str = ""


@dataclass(frozen=True)
class Verdict:
    """The score of one response; None when it cannot be scored, and then `reason` says why.

    `parts` are named components, `extracted` the answer that was compared, `grader` the reward's name and the hash of
    its code. A reward function leaves `grader` and `seconds` to the caller.
    """

    score: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    grader: str = ""
    seconds: float = 0.0
    extracted: str | None = None


_KINDS = ("timeout", "crash", "error", "not finite", "label", "unreachable", "refused", "unparsable")
# Of a sum the reasons of its parts, each behind a name.
_KIND = re.compile(rf"(?:^|: |; )({'|'.join(_KINDS)})(?=$|[:; ])")


def failure_kind(reason: str) -> str:
    """What of a few things the reason of a verdict without a score says in its words; `unscorable` for any others."""
    found = _KIND.search(reason)
    return found[1].replace(" ", "_") if found else "unscorable"


def ungradable(label: Any, problem: str) -> Verdict:
    """The verdict on a sample whose label cannot be graded."""
    return Verdict(None, reason=f"label {label!r:.200} is not an answer: {problem}")
