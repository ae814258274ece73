"""The reward `remote`: a server of yours scores the samples, over HTTP."""

from collections.abc import Mapping
from typing import Any

from milepost.tasks.asked_over_http import Asker, Unanswered, ask_each
from milepost.tasks.scoring import in_batches
from milepost.tasks.verdict import Sample, Verdict

CALL = 64


@in_batches(CALL)
async def remote(
    samples: list[Sample],
    *,
    url: str,
    api_key: str = "",
    batch_size: int = 0,
    deadline_seconds: float = 60.0,
    retries: int = 5,
    concurrency: int = 16,
) -> list[Verdict]:
    """What the server at `url` says of each sample.

    It gets a POST with `prompt`, `response`, `label` and `metadata`, and answers with a number, null, or an object that
    has `score` and perhaps `parts`, `reason` and `extracted`. With a `batch_size` it gets `{"samples": [...]}` of that
    many at most, and answers with a list of as many, or with one as `results`. `deadline_seconds` is for a request
    with all its retries; without an answer the score is null, with the reason.
    """
    if batch_size < 0 or concurrency < 1 or retries < 0:
        raise ValueError("batch_size and retries must be 0 or more, concurrency 1 or more")

    async def ask(asker: Asker, lot: list[Sample]) -> list[Verdict]:
        body = {"samples": list(map(_body, lot))} if batch_size else _body(lot[0])
        try:
            answer = await asker.post(url, body)
            return [_verdict(said) for said in (_results(answer, len(lot)) if batch_size else [answer])]
        except Unanswered as error:
            return [Verdict(None, reason=str(error))] * len(lot)

    lots = _lots(samples, max(1, batch_size))
    found = await ask_each(
        lots, ask, api_key=api_key, deadline_seconds=deadline_seconds, retries=retries, concurrency=concurrency
    )
    return [verdict for verdicts in found for verdict in verdicts]


def _lots(samples: list[Sample], size: int) -> list[list[Sample]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def _body(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "metadata": sample.metadata,
    }


def _results(answer: Any, count: int) -> list[Any]:
    found = answer.get("results") if isinstance(answer, Mapping) else answer
    if not isinstance(found, list) or len(found) != count:
        raise Unanswered(f"unparsable: {str(answer)[:200]!r} has not {count} results")
    return found


def _verdict(said: Any) -> Verdict:
    """An answer as a verdict; one of another shape is null with the reason."""
    content = said if isinstance(said, Mapping) else {"score": said}
    score, parts = content.get("score"), content.get("parts") or {}
    if not _is_number(score, null=True) or not isinstance(parts, Mapping) or not all(map(_is_number, parts.values())):
        return Verdict(None, reason=f"unparsable: {str(said)[:200]!r} is no score")
    extracted = content.get("extracted")
    reason = str(content.get("reason") or "")
    return Verdict(
        None if score is None else float(score),
        {str(key): float(value) for key, value in parts.items()},
        reason=reason or ("" if score is not None else "the server gave no score"),
        extracted=None if extracted is None else str(extracted),
    )


def _is_number(value: Any, *, null: bool = False) -> bool:
    return (null and value is None) or isinstance(value, bool | int | float)
