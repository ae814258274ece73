"""Samples that were made elsewhere as rows of the tables of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

from milepost.engines.tokenizer import Tokenizer
from milepost.storage import prompt_order
from milepost.storage.data_sets import dataset_name
from milepost.storage.foreign import Contents, ForeignSample, Group, bad, read_samples
from milepost.storage.origin import Origin
from milepost.storage.prompt_rows import prompt_id
from milepost.storage.schema import PROMPTS, ROLLOUTS, from_rows
from milepost.storage.text import encodable, escape, to_json

Row = dict[str, Any]
_MAY_LACK = ("rollout_logprobs", "reward", "finish_reason", "seed", "weights_digest")
_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted", None: "completed"}


@dataclass(frozen=True)
class Reader:
    """What reading a row takes; `origin` is told what rows lack."""

    contents: Contents
    opened: IO[bytes]
    reward_key: str
    tokenizer: Tokenizer
    chat_template: bool
    context_length: int
    allow_mismatch: bool
    origin: Origin

    @property
    def dataset(self) -> str:
        return dataset_name(self.contents.file)

    def refusal(self, line: int, reason: str) -> ValueError:
        return bad(self.contents.file, line, reason)


def step_tables(reader: Reader, groups: Sequence[Group], *, run_id: str, step: int, first: int) -> list[pa.Table]:
    """Prompts and scored samples of one step: the prompts as served, `first` being the row of the first of them."""
    prompts, samples = [], []
    for position, group in enumerate(groups):
        name = prompt_order.group_id(step, 0, position) if group.group_id is None else group.group_id
        rows = read_samples(reader.contents.file, reader.opened, group.lines, reader.reward_key)
        prompt = _prompt(reader, group, rows) | {"group_id": name, "row": first + position, "epoch": 0}
        prompts.append(prompt)
        for index, (line, row) in enumerate(zip(group.lines, rows, strict=True)):
            made = _sample(reader, prompt, line.number, row)
            place = {"run_id": run_id, "step": step, "shard": 0, "group_id": name}
            samples.append(place | {"sample_id": f"{name}-{index:03d}"} | made)
    return [from_rows(prompts, PROMPTS), from_rows(samples, ROLLOUTS)]


def _prompt(reader: Reader, group: Group, rows: list[ForeignSample]) -> Row:
    """The prompt of a group, with the metadata that all of its samples share."""
    first = rows[0]
    shared = {
        key: value
        for key, value in (first.metadata or {}).items()
        if all((row.metadata or {}).get(key, _Absent) == value for row in rows)
    }
    return {
        "prompt_id": first.prompt_id or prompt_id(first.asked, first.label, shared),
        "dataset": first.dataset or reader.dataset,
        "prompt": to_json(first.asked),
        "prompt_token_ids": _prompt_tokens(reader, group.lines[0].number, first),
        "label": to_json(first.label),
        "metadata": to_json(shared),
    }


def _prompt_tokens(reader: Reader, line: int, row: ForeignSample) -> list[int]:
    """The ids that a row gives, when its text is in them; else those of the tokenizer."""
    if row.prompt_token_ids is not None:
        if not _asks(reader, row.prompt_token_ids, row):
            _mismatch(reader, line, "prompt_token_ids", str(row.before[-1]["content"]))
        return row.prompt_token_ids
    try:
        ids = _own_prompt_tokens(reader, row)
    except ValueError as error:
        raise reader.refusal(line, f"the tokenizer refuses it: {error}") from None
    if not ids:
        raise reader.refusal(line, "the prompt has no tokens")
    return ids


def _own_prompt_tokens(reader: Reader, row: ForeignSample) -> list[int]:
    asked = encodable(row.asked)
    if isinstance(asked, str) and not reader.chat_template:
        return reader.tokenizer.encode(asked)
    return reader.tokenizer.render(asked)


def _asks(reader: Reader, ids: list[int], row: ForeignSample) -> bool:
    """Whether ids have the text of the last message in them, or are what this tokenizer makes of the prompt."""
    said = encodable(row.before[-1]["content"])
    if not isinstance(said, str) or said.strip() in _decoded(reader, ids):
        return True
    try:
        return ids == _own_prompt_tokens(reader, row)
    except ValueError:
        return False


def _response_tokens(reader: Reader, line: int, row: ForeignSample) -> list[int]:
    if row.response_token_ids is None:
        reader.origin.tokenized += 1
        return reader.tokenizer.encode_response(encodable(row.response), ended=row.finish_reason == "stop")
    begins = str(row.said[0]["content"])
    if not _says(reader, row.response_token_ids, encodable(begins)):
        _mismatch(reader, line, "response_token_ids", begins)
    return row.response_token_ids


def _says(reader: Reader, ids: list[int], text: str) -> bool:
    """Whether ids are a text: begin with it, as a string that ended it may have been cut off it, or are its own ids.

    Some tokenizers lose spaces at the ends, or characters that they have no token for.
    """
    if _decoded(reader, ids).strip().startswith(text.strip()):
        return True
    return any(ids == reader.tokenizer.encode_response(text, ended=ended) for ended in (False, True))


def _decoded(reader: Reader, ids: list[int]) -> str:
    try:
        return reader.tokenizer.decode(ids)
    except (IndexError, OverflowError, TypeError, ValueError):
        return ""  # ids that the tokenizer does not have


def _mismatch(reader: Reader, line: int, column: str, text: str) -> None:
    if not reader.allow_mismatch:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise reader.refusal(
            line,
            f"{column} are not {shown!r} in this tokenizer: give the one that made them, or say --allow-mismatch",
        )
    reader.origin.mismatches += 1


def _sample(reader: Reader, prompt: Row, line: int, row: ForeignSample) -> Row:
    if row.kept and row.drop_reason is not None:
        raise reader.refusal(line, f"is kept and has drop_reason {row.drop_reason!r}: give one of both")
    tokens = _response_tokens(reader, line, row)
    asked = prompt["prompt_token_ids"] if row.prompt_token_ids is None else _prompt_tokens(reader, line, row)
    if len(asked) + len(tokens) > reader.context_length:
        count = f"{len(asked)} + {len(tokens)} tokens, model.context_length is {reader.context_length}"
        raise reader.refusal(line, f"has {count}: raise it with --set model.context_length=")
    response, escaped = escape(row.response)
    for name in _MAY_LACK:
        if getattr(row, name) is None:
            reader.origin.lacking[name] = reader.origin.lacking.get(name, 0) + 1
    given = {"sample_id": row.sample_id} if row.sample_id is not None else {}
    return given | {
        "prompt_id": prompt["prompt_id"],
        "dataset": prompt["dataset"],
        "prompt": prompt["prompt"],
        "prompt_token_ids": asked,
        "label": prompt["label"],
        "response": response,
        "response_escaped": escaped,
        "response_token_ids": tokens,
        "loss_mask": [1] * len(tokens) if row.loss_mask is None else row.loss_mask,
        "rollout_logprobs": row.rollout_logprobs,
        "finish_reason": row.finish_reason,
        "status": row.status or _STATUS[row.finish_reason],
        "weight_version_min": _first(row.weight_version_min, row.weight_version),
        "weight_version_max": _first(row.weight_version_max, row.weight_version),
        "weights_digest": row.weights_digest,
        "turns": _first(row.turns, 1),
        "seed": row.seed,
        "sampling": to_json(row.sampling or {}),
        "metadata": to_json(row.metadata or {}),
        "reward": row.reward,
        "rewards": None if row.rewards is None else list(row.rewards.items()),
        "verdict": _verdict(reader, row),
        "kept": row.kept,
        "drop_reason": row.drop_reason or (None if row.kept in (None, True) else "imported"),
    }


def _first(value: int | None, other: int | None) -> int | None:
    return other if value is None else value


def _verdict(reader: Reader, row: ForeignSample) -> str | None:
    """What the row says of its score; a bare reward was given by the file, which its digest tells from others."""
    if row.verdict is not None:
        return to_json(row.verdict)
    if row.reward is None:
        return None
    grader = f"{reader.dataset}.jsonl@{reader.contents.digest[:8]}"
    return to_json({"score": row.reward, "parts": row.rewards or {}, "reason": "", "grader": grader, "extracted": None})


class _Absent:
    """In the place of a key that a row does not have."""
