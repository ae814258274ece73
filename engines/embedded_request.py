"""The body of POST /generate, read strictly: what SGLang takes and this engine cannot do is refused, never ignored."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from milepost.storage.registry import nearest

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. `max_new_tokens` None means up to the context length; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    max_new_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int = field(default_factory=lambda: secrets.randbits(53))
    skip_special_tokens: bool = True
    no_stop_trim: bool = False


@dataclass(frozen=True)
class CompletionRequest:
    """One prompt to complete. `batch_rid` is the request id its client gave to the whole call, if any."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    return_logprob: bool = False
    batch_rid: str | None = None


@dataclass(frozen=True)
class GenerateCall:
    """One POST /generate: its completions, whether it was a list, and whether it wants server-sent events."""

    requests: list[CompletionRequest]
    is_batch: bool
    stream: bool


@dataclass(frozen=True)
class Limits:
    """What a prompt is checked against, and how text becomes one."""

    vocab_size: int
    context_length: int
    encode: Callable[[str], list[int]]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number of at least 0 (0 is greedy)"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1]"),
    "top_k": (lambda v: _is_integer(v) and (v == -1 or v >= 1), "a positive integer, or -1 for all tokens"),
    "min_new_tokens": (lambda v: _is_integer(v) and v >= 0, "an integer of at least 0"),
    "max_new_tokens": (lambda v: _is_integer(v) and v >= 1, "a positive integer"),
    "stop": (lambda v: _is_stop(v) or _is_list_of(_is_stop)(v), "a non-empty string or a list of them"),
    "stop_token_ids": (_is_list_of(_is_integer), "a list of token ids"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "sampling_seed": (lambda v: _is_integer(v) and 0 <= v <= MAX_SEED, "an integer from 0 to 2**63 - 1"),
    "skip_special_tokens": (lambda v: isinstance(v, bool), "true or false"),
    "no_stop_trim": (lambda v: isinstance(v, bool), "true or false"),
}

# SGLang's other parameters: fine at the value that changes nothing.
_NEUTRAL_PARAMS: dict[str, Any] = {
    "n": 1,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "spaces_between_special_tokens": True,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "logit_bias": None,
    "custom_params": None,
    "stream_interval": None,
}
_NEUTRAL_FIELDS: dict[str, Any] = {
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "return_text_in_logprobs": False,
    "return_hidden_states": False,
    "input_embeds": None,
    "image_data": None,
    "lora_path": None,
}
_FIELDS = ("text", "input_ids", "sampling_params", "rid", "return_logprob", "stream")


def _refuse_unsupported(given: Mapping[str, Any], known: list[str], neutral: Mapping[str, Any], where: str) -> None:
    for name, value in given.items():
        if name in neutral:
            if value is not None and value != neutral[name]:
                raise ValueError(f"{where} {name}={value!r} is not supported by this engine: leave it out")
        elif name not in known:
            raise ValueError(f"unknown {where} {name!r}{nearest(name, [*known, *neutral])} known: {sorted(known)}")


def parse_sampling(given: Any) -> SamplingParams:
    """Checked sampling parameters from a JSON object; null is the default. Raises ValueError naming value and rule."""
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ValueError(f"sampling_params is {given!r}, expected an object or a list with an object for each prompt")
    _refuse_unsupported(given, list(_RULES), _NEUTRAL_PARAMS, "sampling parameter")
    values = {name: value for name, value in given.items() if name in _RULES and value is not None}
    for name, value in values.items():
        accepts, rule = _RULES[name]
        if not accepts(value):
            raise ValueError(f"sampling parameter {name} is {value!r}, expected {rule}")
    if "stop" in values:
        values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
    if "max_new_tokens" in given and given["max_new_tokens"] is None:
        values["max_new_tokens"] = None
    params = SamplingParams(**values)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise ValueError(
            f"sampling parameter min_new_tokens is {params.min_new_tokens}, expected at most max_new_tokens "
            f"({params.max_new_tokens})"
        )
    return params


def _check_prompt(input_ids: Any, limits: Limits) -> tuple[int, ...]:
    if not _is_list_of(_is_integer)(input_ids):
        raise ValueError("input_ids is not a list of token ids, or a list of such lists")
    if not input_ids:
        raise ValueError("the prompt is empty: give at least one token")
    if len(input_ids) >= limits.context_length:
        raise ValueError(
            f"the prompt has {len(input_ids)} tokens, which leaves no room for a response in a context length of "
            f"{limits.context_length}: shorten it"
        )
    outside = next((token for token in input_ids if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the vocabulary of {limits.vocab_size} tokens")
    return tuple(input_ids)


def _prompts(body: Mapping[str, Any], limits: Limits) -> tuple[list[tuple[int, ...]], bool]:
    """The checked prompts of a call, and whether they came as a list."""
    text, input_ids = body.get("text"), body.get("input_ids")
    if (text is None) == (input_ids is None):
        raise ValueError("give either text or input_ids")
    if text is not None:
        is_batch = isinstance(text, list)
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(item, str) for item in texts):
            raise ValueError(f"text is {text!r}, expected a string or a list of strings")
        prompts: list[Any] = [limits.encode(item) for item in texts]
    else:
        is_batch = isinstance(input_ids, list) and bool(input_ids) and isinstance(input_ids[0], list)
        prompts = input_ids if isinstance(input_ids, list) and is_batch else [input_ids]
    if not prompts:
        raise ValueError("the list of prompts is empty: give at least one prompt")
    return [_check_prompt(prompt, limits) for prompt in prompts], is_batch


def _per_prompt(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt: a list as it is, anything else repeated."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for each")
    return value


def _rids(rid: Any, count: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and is_batch:
        return [f"{rid}_{index}" for index in range(count)]
    rids = _per_prompt(rid, count, "rid")
    if not all(isinstance(item, str) and item for item in rids):
        raise ValueError(f"rid is {rid!r}, expected a non-empty string or a list of them")
    return rids


def parse_generate(body: Any, limits: Limits) -> GenerateCall:
    """A checked call from the JSON body of POST /generate. Raises ValueError with one sentence."""
    if not isinstance(body, dict):
        raise ValueError("the body of /generate is not a JSON object")
    _refuse_unsupported(body, list(_FIELDS), _NEUTRAL_FIELDS, "field")
    prompts, is_batch = _prompts(body, limits)
    count = len(prompts)
    params = [parse_sampling(item) for item in _per_prompt(body.get("sampling_params"), count, "sampling_params")]
    wanted = [bool(item) for item in _per_prompt(body.get("return_logprob"), count, "return_logprob")]
    for item in params:
        outside = next((token for token in item.stop_token_ids if not 0 <= token < limits.vocab_size), None)
        if outside is not None:
            raise ValueError(f"stop token id {outside} is outside the vocabulary of {limits.vocab_size} tokens")
    rid = body.get("rid")
    batch_rid = rid if isinstance(rid, str) and is_batch else None
    requests = [
        CompletionRequest(name, prompt, sampling, logprob, batch_rid)
        for name, prompt, sampling, logprob in zip(_rids(rid, count, is_batch), prompts, params, wanted, strict=True)
    ]
    return GenerateCall(requests, is_batch, stream=bool(body.get("stream")))
