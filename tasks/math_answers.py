"""Finding the final answer in a response, and writing it so that equal ones look equal. Nothing is evaluated here."""

import re
import unicodedata
from collections.abc import Callable

from milepost.tasks.extraction import after_thinking, is_braced, last_boxed

MAX_LINE = 2000  # of a line without a box, the end that is searched

_MARKED = re.compile(
    r"(?:\banswer\b[\s*_]*(?:\bis\b|[:=])[\s*_:]*(?:(?:therefore|thus|then|simply|just|exactly|equal to)\s+)?|####\s*)"
    r"(\S.*)",
    re.IGNORECASE,
)
_LEAD = re.compile(r"(?<![<>!=])=>?(?!=)|->|(?<=[A-Za-z)]):\s")
_INLINE_MATH = re.compile(r"\$\$?([^$]+)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]")
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
        "\u22c5": r"\cdot ",
        "\u00f7": "/",
        "\u2044": "/",
        "\u2215": "/",
        "\u00b0": " ",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u2248": r"\approx ",
        "\u2208": r"\in ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "\u2205": r"\emptyset ",
        "\u211d": r"\mathbb{R} ",
        "\u00b1": r"\pm ",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "\u3002": ".",
        "\u3001": ",",
        "$": "",
        "\u20ac": "",
        "\u00a3": "",
        "\u00a5": "",
    }
)
_SUPERSCRIPT = re.compile("[\u207b\u207a\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_STYLES = "text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|operatorname|underline|boxed"
_NUMBER = r"(?<![\d.])(\d+(?:\.\d+)?)\s?"
_TENS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PATTERNS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\\\\s+", r"\\\\"),
    (r"(?<!\\)\\[()\[\]]", ""),
    (r"\\(?:color\s*\{[^{}]*\}|textcolor\s*\{[^{}]*\})\s*(?:\{([^{}]*)\})?", r" \1 "),
    *[(rf"\\(?:{_STYLES})\s*\{{([^{{}}]*)\}}", r" \1 ")] * 3,  # from the inside out
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|textstyle|bf|rm|it|mathstrut)(?![a-zA-Z])\s*", ""),
    (r"(?<!\\)\\[!,;: ]|~|\\q?quad", " "),
    (r"\\(?:geqslant|geq)(?![a-zA-Z])", r"\\ge"),
    (r"\\(?:leqslant|leq)(?![a-zA-Z])", r"\\le"),
    (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\{([pbv]|small)matrix\}", "{matrix}"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree", " "),
    (r"\{,\}", ","),
    (r"(?<=[\w)}\]])\s?\*\*\s?(?=[\w({\[-])", "^"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\%", "%"),
    (r"(?<![A-Za-z])(?:percent|per cent)(?![A-Za-z])", "%"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
    (r"(?:(?<![A-Za-z\\])sqrt|\\sqrt)\s?\(([^()]*)\)", r"\\sqrt{\1}"),
    ("\u221a\\s?\\(([^()]*)\\)", r"\\sqrt{\1}"),
    ("\u221a\\s?(\\d+(?:\\.\\d+)?|[A-Za-z])", r"\\sqrt{\1}"),
    (r"(?<![\d,.(\[{])([-+]?\d{1,3}(?:,\d{3})+)(?![\d,])", lambda match: match.group(1).replace(",", "")),
    (r"(?<!\d)\.(?=\d)", "0."),
    (r"\s+", " "),
    (r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?![\d/]| \d)", lambda match: match.group(1).replace(" ", "")),
    *((rf"{_NUMBER}{word}(?![A-Za-z])", rf"\1\\times 10^{{{power}}}") for word, power in _TENS.items()),
    (r"(?i)^\s?(?:the )?(?:final )?answer ?(?:is|:|=) ?(?=\S)", ""),
    (r"^\s?\\approx(?![a-zA-Z])", ""),
]
_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in _PATTERNS]


def extract_answer(response: str, *, boxed_only: bool = False) -> str | None:
    """The final answer as written, or None when there is none.

    In this order, and only after the thinking: the last complete `\\boxed{}`; what follows the last "answer is",
    "answer:" or "####"; the last formula, right side or number of the last line; that line.
    """
    text = after_thinking(response)
    boxed = last_boxed(text)
    if boxed is not None or boxed_only:
        return boxed
    marked = _MARKED.findall(text)
    if marked:
        return _tail(_SENTENCE_END.split(marked[-1][:MAX_LINE])[0])
    lines = [line for line in text.splitlines() if line.strip()]
    return _tail(lines[-1][-MAX_LINE:]) if lines else None


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
    text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match.group(0)) + " ", text)
    text = "".join(map(_ascii, text)).replace("\\$", "").translate(_SYMBOLS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("*_`").strip()
    while is_braced(text):
        text = text[1:-1].strip()
    if not re.search(r"[\w)}]!$|\\[{}]$", text):
        text = text.rstrip(".,;:! \\")
    return text.strip("*_` ")


def _ascii(character: str) -> str:
    """Digits of any script, and full-width forms, as ASCII."""
    if character.isascii():
        return character
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.digit(character))
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    return character
