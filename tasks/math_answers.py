"""Finding the final answer in a response, and writing it so that equal ones look equal. Nothing is evaluated here."""

import re
import unicodedata

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE_BOX = re.compile(r"[^\s{}$]+")
_MARKED = re.compile(
    r"(?:\banswer\b[\s*_]*(?:\bis\b|[:=])[\s*_:]*(?:(?:therefore|thus|then|simply|just|exactly|equal to)\s+)?|####\s*)"
    r"(\S.*)",
    re.IGNORECASE,
)
_LEAD = re.compile(r"(?<![<>!=])=>?(?!=)|->|(?<=[A-Za-z)]):\s")
_INLINE_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_NUMBER_IN_TEXT = re.compile(r"-?(?:\d[\d,]*)?\.?\d+(?:\s*/\s*\d+)?%?")
_SENTENCE_END = re.compile(r"\.\s+(?=[A-Z])")

_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\u2010": "-",
        "\u2011": "-",
        "\u2013": "-",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u2044": "/",
        "\u00b0": "",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u221a": r"\sqrt ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u222a": r"\cup ",
        "\u2205": r"\emptyset ",
        "\u00b1": r"\pm ",
        "\u00a0": " ",
        "\u3002": ".",
        "$": "",
        "\u20ac": "",
        "\u00a3": "",
    }
)
_SUPERSCRIPT = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[()\[\]]", ""),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:left|right|bigl|bigr|big|displaystyle)(?![a-zA-Z])\s*", ""),
        (r"\\[!,;: ]|~|\\q?quad", " "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree", ""),
        (r"\{,\}", ","),
        (r"\*\*", "^"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\%", "%"),
        (r"(?<![\d,.(\[{])([-+]?\d{1,3}(?:,\d{3})+)(?![\d,])", lambda match: match.group(1).replace(",", "")),
        (r"(?<!\d)\.(?=\d)", "0."),
        (r"\s+", " "),
        (r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?![\d/]| \d)", lambda match: match.group(1).replace(" ", "")),
    )
]


def extract_answer(response: str, *, boxed_only: bool = False) -> str | None:
    """The final answer as written, or None when there is none.

    In this order, and only after the last `</think>`: the last complete `\\boxed{}`; what follows the last "answer is",
    "answer:" or "####"; the last formula, right side or number of the last line; that line.
    """
    text = response.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None or boxed_only:
        return boxed
    marked = _MARKED.findall(text)
    if marked:
        return _tail(_SENTENCE_END.split(marked[-1])[0])
    lines = [line for line in text.splitlines() if line.strip()]
    return _tail(lines[-1]) if lines else None


def last_boxed(text: str) -> str | None:
    """What is in the last `\\boxed{...}` or `\\fbox{...}` whose braces close, or after a `\\boxed` without braces."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if text[start : start + 1] != "{":
            bare = _BARE_BOX.match(text, start)
            if bare:
                return bare.group(0)
            continue
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(0), 0)
        if depth == 0 and match.group(0) == "}":
            return match.start()
    return None


def _tail(line: str) -> str:
    """The answer in a line: its last formula, what follows `=` or a colon, its last number, or all of it."""
    formulas = _INLINE_MATH.findall(line)
    if formulas:
        line = next(part for part in formulas[-1] if part)
    line = line.strip().strip("*_").strip()
    if "\\" not in line:
        line = _LEAD.split(line)[-1].strip() or line
    numbers = _NUMBER_IN_TEXT.findall(line)
    if len(line.split()) > 3 and numbers and re.search(r"[A-Za-z]{3}", line) and "\\" not in line:
        return str(numbers[-1]).rstrip(",")
    return line


def normal_form(text: str) -> str:
    """`text` in plain LaTeX: ASCII digits and signs, without spacing, currency, degrees and digit separators."""
    text = _SUPERSCRIPT.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match.group(0)) + "}", text)
    text = "".join(map(_ascii, text)).replace("\\$", "").translate(_SYMBOLS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("*_`").strip()
    if text.startswith("{") and _closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text.rstrip(".,;:! ") if not re.search(r"[\w)}]!$", text) else text


def _ascii(character: str) -> str:
    """Digits of any script, and full-width forms, as ASCII."""
    if character.isascii():
        return character
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.digit(character))
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    return character
