"""`math` verdicts a second from 2 graders, on answers of all kinds of which 1 % are made to hang a grader.

`python tests/bench/bench_grade.py [SAMPLES]`; the longest verdict is bound by the limit and a second.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from milepost.engines.local_graders import LocalGraders
from milepost.tasks.grading import grade_rows
from milepost.tasks.reward_choice import single

WORKERS = 2
LIMIT_SECONDS = 5.0
PATHOLOGICAL = [
    "9**9**9**9",
    "10^{10^{10}}",
    "(999999)!",
    "((9^9)^9)^{99}",
    "(" * 5000 + "5" + ")" * 5000,
    r"\sqrt{2+" * 40 + "2" + "}" * 40,
    "{" * 500_000 + "}" * 500_000,
    "(a+b+c+d+f)^{200}",
    r"\sum_{k=1}^{10^9} k^k",
    r"e^{e^{e^{e^{9}}}}",
]

Made = tuple[str, str]  # an answer and a label


def numeral(draw: random.Random) -> Made:
    number = draw.randrange(-5000, 100_000)
    return draw.choice([f"{number:,}", f"{number}.0", rf"{number}\text{{ cm}}", str(number + draw.randrange(2))]), str(
        number
    )


def fraction(draw: random.Random) -> Made:
    top, bottom = draw.randrange(1, 50), draw.randrange(2, 50)
    return rf"\dfrac{{{2 * top}}}{{{2 * bottom}}}", draw.choice([f"{top}/{bottom}", f"{top / bottom:.8f}", f"{top}"])


def members(draw: random.Random) -> Made:
    numbers = draw.sample(range(100), draw.randrange(2, 5))
    opening, closing = draw.choice([(r"\{", r"\}"), ("(", ")"), ("[", ")"), ("", "")])
    return tuple(opening + ", ".join(map(str, side)) + closing for side in (numbers, numbers[::-1]))  # type: ignore[return-value]


def expression(draw: random.Random) -> Made:
    a, b = draw.randrange(2, 20), draw.randrange(2, 20)
    forms = [
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
        (f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b}".replace("+-", "-")),
        (rf"\frac{{{a}\pi}}{{{b}}}", rf"{a}\pi/{b}"),
        (f"{a}x+{b}", f"{b}+{a}x"),
        (f"{a}x+{b}", f"{a}x-{b}"),
        (f"2^{{{a}}}", str(2**a)),
    ]
    return draw.choice(forms)


def words(draw: random.Random) -> Made:
    return draw.choice(["Monday", r"\text{Yes}", r"\textbf{(C)}", "even"]), draw.choice(["Monday", "no", "C", "odd"])


def pathological(draw: random.Random) -> Made:
    return draw.choice(PATHOLOGICAL), "5.5"


KINDS: dict[Callable[[random.Random], Made], int] = {
    numeral: 55,
    fraction: 15,
    members: 9,
    expression: 12,
    words: 8,
    pathological: 1,
}


def corpus(count: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    kinds = draw.choices(list(KINDS), list(KINDS.values()), k=count)
    made = [kind(draw) for kind in kinds]
    return [{"response": rf"<think>so</think> It is \boxed{{{answer}}}.", "label": label} for answer, label in made]


def main(count: int) -> None:
    rows = corpus(count)
    choice = single("math", {})
    with LocalGraders(workers=WORKERS) as graders:
        asyncio.run(grade_rows(graders, choice, rows[:WORKERS], timeout_seconds=LIMIT_SECONDS))
        started = time.perf_counter()
        verdicts = asyncio.run(grade_rows(graders, choice, rows, timeout_seconds=LIMIT_SECONDS))
        taken = time.perf_counter() - started
    longest = max(verdict.seconds for verdict in verdicts)
    assert len(verdicts) == count and longest < LIMIT_SECONDS + 1
    scores = Counter(str(verdict.score) for verdict in verdicts)
    print(f"{count} verdicts, {count / taken:.0f}/s, the longest {longest:.2f} s, by score {dict(scores)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
