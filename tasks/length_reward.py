"""The penalty for long responses: DAPO's soft overlong punishment (arXiv:2503.14476, equation 13)."""

from milepost.tasks.verdict import Sample, Verdict


def length_penalty(sample: Sample, *, max_tokens: int, buffer_tokens: int) -> Verdict:
    """0.0 up to `max_tokens - buffer_tokens` tokens, from there in a line down to -1.0 at `max_tokens`; -1.0 beyond.

    The length is that of the response's token ids as the engine made them, a part called `tokens`; a response that no
    engine made has none, and no score. The label is not looked at. Meant as a part beside another reward.
    """
    if not 0 <= buffer_tokens <= max_tokens or max_tokens < 1:
        raise ValueError(f"buffer_tokens is {buffer_tokens}, it must be from 0 to max_tokens, {max_tokens}")
    length = sample.response_tokens
    if length is None:
        return Verdict(None, reason="the number of tokens is not known: grade a sample that an engine generated")
    over = length - (max_tokens - buffer_tokens)
    score = 0.0 if over <= 0 else max(-1.0, -over / buffer_tokens) if buffer_tokens else -1.0
    return Verdict(score, {"tokens": float(length)})
