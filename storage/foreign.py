"""Rollouts that were made elsewhere: JSON lines of messages whose last one is the answer, and groups of them.

What a row does not say is null. A file is read twice, so that it may be larger than memory: once for its groups, then
a group at a time.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, ValidationError

from milepost.storage import files
from milepost.storage.conversation import said_after
from milepost.storage.messages import Messages
from milepost.storage.prompt_source import BadLine, parse_line


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str) or "content" not in message:
        raise ValueError("a message has 'role' and 'content'")
    return message


def _answered(messages: Messages) -> Messages:
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or not isinstance(messages[-1]["content"], str):
        raise ValueError("the last message must be the assistant's answer, as text, and a prompt before it")
    return messages


Token = Annotated[int, Field(ge=0, lt=2**31)]
# True and false are rewards, too; the square of one has to be a number.
Number = Annotated[FiniteFloat, Field(strict=False, ge=-1e100, le=1e100)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ForeignSample(BaseModel):
    """One row. `prompt` is text where the only message of the prompt stands for text without a chat template."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    messages: Annotated[list[Annotated[dict[str, Any], AfterValidator(_message)]], AfterValidator(_answered)]
    prompt: Any = None
    label: Any = None
    metadata: dict[str, Any] | None = None
    reward: Number | None = None
    rewards: dict[str, Number] | None = None
    verdict: dict[str, Any] | None = None
    step: int | None = None
    group_id: str | None = None
    sample_id: str | None = None
    prompt_id: str | None = None
    dataset: str | None = None
    prompt_token_ids: Annotated[list[Token], Field(min_length=1)] | None = None
    response_token_ids: list[Token] | None = None
    loss_mask: list[Literal[0, 1]] | None = None
    rollout_logprobs: list[FiniteFloat] | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    status: Literal["completed", "truncated", "aborted", "invalid", "interrupted"] | None = None
    weight_version: Whole | None = None
    weight_version_min: Whole | None = None
    weight_version_max: Whole | None = None
    weights_digest: str | None = None
    turns: NonNegativeInt | None = None
    seed: Whole | None = None
    sampling: dict[str, Any] | None = None
    kept: bool | None = None
    drop_reason: str | None = None

    @property
    def response(self) -> str:
        return str(self.messages[-1]["content"])

    @property
    def said(self) -> Messages:
        """What the response tokens are of: the answer, or the conversation that the metadata tell in the same words."""
        if self.response_token_ids is None:
            return self.messages[-1:]
        talk = said_after(self.metadata or {}, self.response)
        last = self.messages[-len(talk) :]
        is_told = [message.get("content") for message in talk] == [message["content"] for message in last]
        return last if is_told and len(last) < len(self.messages) else self.messages[-1:]

    @property
    def before(self) -> Messages:
        """The messages of the prompt."""
        return self.messages[: -len(self.said)]

    @property
    def asked(self) -> str | Messages:
        """The prompt: its messages, or its text."""
        before = self.before
        is_text = isinstance(self.prompt, str) and before == [{"role": "user", "content": self.prompt}]
        return str(self.prompt) if is_text else before

    @property
    def prompt_key(self) -> str:
        """Equal for samples of one prompt."""
        return files.canonical_json([self.asked, self.label])


@dataclass(frozen=True)
class Line:
    """Where a row is: its number, from 1, and its bytes."""

    number: int
    offset: int
    size: int


@dataclass
class Group:
    """The lines of the samples of one prompt. `group_id` is the one that they name, if they name any."""

    group_id: str | None
    prompt: str
    step: int | None
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Contents:
    """A file as it was read the first time: its groups in the order of their first samples."""

    file: str
    digest: str
    rows: int
    groups: list[Group]
    ignored: list[str]
    """Keys of rows that mean nothing here."""


def read_contents(file: str, reward_key: str) -> Contents:
    """Check every row of a JSONL file and group them; ValueError names the file, the line and what is wrong."""
    if not file.endswith(".jsonl"):
        raise ValueError(f"{file!r} must be a .jsonl file")
    groups: dict[str, Group] = {}
    seen: dict[str, int] = {}
    named: dict[str, bool] = {}
    ignored: set[str] = set()
    digest, rows = hashlib.sha256(), 0
    for line, data in _lines(file):
        digest.update(data)
        if not data.strip():
            continue
        sample, keys = _parse(file, line.number, data, reward_key)
        ignored |= keys - ForeignSample.model_fields.keys() - {reward_key}
        for key in ("group_id", "sample_id"):
            given = getattr(sample, key) is not None
            if named.setdefault(key, given) != given:
                raise bad(file, line.number, f"{'has a' if given else 'has no'} {key}: give all rows one, or none")
        if sample.sample_id is not None and seen.setdefault(sample.sample_id, line.number) != line.number:
            raise bad(file, line.number, f"sample_id {sample.sample_id!r} is that of line {seen[sample.sample_id]}")
        key = hashlib.sha256(sample.prompt_key.encode()).hexdigest()
        group = groups.setdefault(
            key if sample.group_id is None else sample.group_id, Group(sample.group_id, key, sample.step)
        )
        if group.prompt != key:
            first = group.lines[0].number
            raise bad(
                file, line.number, f"has group_id {sample.group_id!r} and another prompt or label than line {first}"
            )
        group.lines.append(line)
        rows += 1
    if not rows:
        raise ValueError(f"{file} holds no rows: give a file with at least one")
    return Contents(file, digest.hexdigest(), rows, list(groups.values()), sorted(ignored))


def _lines(file: str) -> Iterator[tuple[Line, bytes]]:
    fs, path = files.filesystem(file)
    if not fs.isfile(path):
        raise ValueError(f"{file!r} is no file: give a .jsonl file")
    offset = 0
    with fs.open(path, "rb") as opened:
        for number, data in enumerate(opened, start=1):
            yield Line(number, offset, len(data)), data
            offset += len(data)


def read_samples(file: str, opened: IO[bytes], lines: list[Line], reward_key: str) -> list[ForeignSample]:
    """The rows at some lines of an open file that was checked before."""
    found = []
    for line in lines:
        opened.seek(line.offset)
        found.append(_parse(file, line.number, opened.read(line.size), reward_key)[0])
    return found


def _parse(file: str, number: int, data: bytes, reward_key: str) -> tuple[ForeignSample, set[str]]:
    """A row, and the keys that it has."""
    found = parse_line(0, number, data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data)
    if isinstance(found, BadLine):
        raise bad(file, number, found.reason)
    value = found.value if reward_key == "reward" else found.value | {"reward": found.value.get(reward_key)}
    try:
        sample = ForeignSample.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = repr(first["input"])
        shown = said if len(said) <= 80 else f"{said[:80]}..."
        problem = first["msg"].removeprefix("Value error, ")
        raise bad(file, number, f"{where} is {shown}: {problem}") from None
    _check_lengths(file, number, sample)
    return sample, set(found.value)


def _check_lengths(file: str, number: int, sample: ForeignSample) -> None:
    """What is said of each token is said of as many as there are."""
    for name in ("loss_mask", "rollout_logprobs"):
        values = getattr(sample, name)
        if values is None:
            continue
        if sample.response_token_ids is None:
            raise bad(file, number, f"has {name} and no response_token_ids that they are of")
        if len(values) != len(sample.response_token_ids):
            tokens = len(sample.response_token_ids)
            raise bad(file, number, f"has {len(values)} values of {name} for {tokens} response tokens")


def bad(file: str, line: int, reason: str) -> ValueError:
    return ValueError(f"{file} line {line}: {reason}")
