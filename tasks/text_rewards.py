"""Rewards that compare text as it stands. Spaces at either end of response and label do not count."""

import re
from typing import Any

from milepost.tasks.verdict import Sample, Verdict


def exact(sample: Sample, *, ignore_case: bool = False) -> Verdict:
    """1.0 when the response equals the label, a string or a number, or one of a list of them."""
    accepted = sample.label if isinstance(sample.label, list) else [sample.label]
    wanted = [_text(label) for label in accepted]
    found = sample.response.strip()
    if ignore_case:
        wanted, same = [label.casefold() for label in wanted], found.casefold()
    else:
        same = found
    return Verdict(float(same in wanted), extracted=found)


def regex(sample: Sample, *, pattern: str = "", search: bool = False, ignore_case: bool = False) -> Verdict:
    """1.0 when the pattern matches the response: all of it, or with `search` a part. The label is the default pattern.

    A pattern that backtracks for ever ends with the grader's deadline.
    """
    source = pattern or sample.label
    problem = regex_label_problem(source)
    if problem:
        raise ValueError(f"the pattern is {source!r}: {problem}")
    compiled = re.compile(source, re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG))
    match = compiled.search(sample.response) if search else compiled.fullmatch(sample.response.strip())
    return Verdict(float(match is not None), extracted=match.group(0) if match else None)


def exact_label_problem(label: Any, options: Any = None) -> str:
    """Why a label is no text; empty when it is a string, a number or a list of them."""
    labels = label if isinstance(label, list) else [label]
    plain = all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in labels)
    return "" if labels and plain else "give a string, a number or a list of them"


def regex_label_problem(label: Any, options: Any = None) -> str:
    """Why neither the label nor the option `pattern` is a regular expression; empty when one is."""
    source = (options or {}).get("pattern") or label
    if not isinstance(source, str) or not source:
        return "set the option 'pattern', or give a regular expression"
    try:
        re.compile(source)
    except re.error as error:
        return f"it is no regular expression ({error}), escape what is meant literally"
    return ""


def _text(label: object) -> str:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label is {label!r}, it must be a string or a number")
    return str(label).strip()
