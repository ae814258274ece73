"""What of a response is its answer: the text after the thinking, and what is in its last box.

Responses are as long and as odd as a model makes them: everything here takes time linear in their length.
"""

import re

# How models end their thinking; the answer is what follows the last of them.
THINKING_ENDS = (
    "</think>",
    "</thinking>",
    "</thought>",
    "</reasoning>",
    "[/THINK]",
    "<|channel|>final<|message|>",
    "<channel|>",
)

# A doubled backslash is a line break, unless a box follows: `\\boxed` is one that was escaped twice.
_BRACES = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{)?|\\\\(?!boxed|fbox)|\\[{}]|[{}]")
_BARE_BOX = re.compile(r"[^\s{}$]+")


def after_thinking(response: str) -> str:
    """What follows the end of the thinking; all of a response that has no such end."""
    start = max((response.rfind(end) + len(end) for end in THINKING_ENDS if end in response), default=0)
    return response[start:]


def last_boxed(text: str) -> str | None:
    """What is in the last `\\boxed{...}` or `\\fbox{...}` whose braces close, or after a `\\boxed` without braces."""
    last = (-1, -1)
    opened: list[int] = []  # where the content of each open brace starts; negative when it is no box's
    for match in _BRACES.finditer(text):
        token = match.group(0)
        if token.startswith(("\\b", "\\f")):
            if match.group(1):
                opened.append(match.end())
            elif bare := _BARE_BOX.match(text, match.end()):
                last = max(last, bare.span())
        elif token == "{":
            opened.append(-1)
        elif token == "}" and opened:
            start = opened.pop()
            last = max(last, (start, match.start())) if start >= 0 else last
    return None if last[0] < 0 else text[slice(*last)]


def is_braced(text: str) -> bool:
    """Whether one pair of braces encloses all of `text`."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(0), 0)
        if depth == 0:
            return match.group(0) == "}" and match.end() == len(text) and text.startswith("{")
    return False
