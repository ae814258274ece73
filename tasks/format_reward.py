"""The reward for the form of a response, whatever it says: tags in order, or a regular expression."""

import re

from milepost.tasks.verdict import Sample, Verdict


def format(sample: Sample, *, tags: str = "think,answer", pattern: str = "", opened: bool = False) -> Verdict:
    """1.0 when the response has the form; otherwise 0.0. The label is not looked at.

    Either `pattern` matches all of the response, or it is one element for each of `tags`, in this order, and nothing
    else: each opened and closed once, none empty, none in another, only white space between and around them. With
    `opened` the prompt has opened the first tag already. Each tag that is there once and closed is a part of its own.
    """
    if pattern:
        matched = re.compile(pattern, re.DOTALL).fullmatch(sample.response.strip()) is not None
        return Verdict(float(matched), reason="" if matched else "the pattern does not match")
    names = [name.strip() for name in tags.split(",")]
    if not all(re.fullmatch(r"[\w.:-]+", name) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"tags is {tags!r}: give different names with commas between them, such as 'think,answer'")
    text = f"<{names[0]}>{sample.response}" if opened else sample.response
    parts = {name: float(text.count(f"<{name}>") == text.count(f"</{name}>") == 1) for name in names}
    reason = next((f"<{name}> is not there once" for name, once in parts.items() if not once), "") or _wrong(
        text, names
    )
    return Verdict(float(not reason), parts, reason=reason)


def _wrong(text: str, names: list[str]) -> str:
    """What is wrong with a text that has each tag once."""
    at = 0
    for name in names:
        start, end = text.find(f"<{name}>"), text.find(f"</{name}>")
        if not at <= start < end:
            return f"<{name}> is not in its place"
        if text[at:start].strip():
            return f"text before <{name}>"
        if not text[start + len(name) + 2 : end].strip():
            return f"<{name}> is empty"
        at = end + len(name) + 3
    return "text after the last tag" if text[at:].strip() else ""
