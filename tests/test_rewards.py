"""Rewards in their own process: every response gets a verdict, whatever the reward or the response does."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from milepost.tasks.reward_choice import single
from milepost.tasks.rewards import check_reward, grade, grader_id
from milepost.tasks.score import why_none
from milepost.tasks.scoring import score
from milepost.tasks.verdict import Verdict

pytestmark = pytest.mark.slow

OWN = """
import os, time, sys
import numpy as np
from milepost.tasks.verdict import Verdict

def scalar(sample): return np.float32(0.5)
def truth(sample): return sample.response == sample.label
def nan(sample): return float("nan")
def text(sample): return "1.0"
def nothing(sample): return None
def hang(sample): time.sleep(60)
def crash(sample): os.abort()
def leave(sample): sys.exit(0)
def noisy(sample): print("x" * 100000); return 1
def raises(sample): raise KeyError("k")
def memory(sample): return len(bytearray(64 * 1024**3))
def parts(sample): return Verdict(1.0, {"a": 0.5, "b": float("inf")}, extracted="e")
def reads(sample, *, scale): return scale * len(sample.prompt) + sample.metadata["bonus"]
async def later(sample): return 0.25
def pid(sample): return os.getpid()
"""


@pytest.fixture(scope="module", autouse=True)
def own_rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module `own_rewards` where this process, and so its graders, can import it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("name", "score"), [("scalar", 0.5), ("truth", 1.0), ("later", 0.25), ("noisy", 1.0), ("parts", 1.0)]
)
def test_what_a_reward_may_return(name: str, score: float) -> None:
    verdict = grade(f"own_rewards:{name}", "x", "x")
    assert (verdict.score, verdict.reason) == (score, "")
    assert verdict.seconds < 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nan", "not finite: nan"),
        ("nothing", "unscorable"),
        ("text", "must return a number, a bool, a Verdict or None"),
        ("hang", "timeout"),
        ("crash", "crash"),
        ("leave", "crash"),
        ("raises", "error: KeyError: 'k'"),
        ("memory", "error: MemoryError"),
    ],
)
def test_whatever_else_it_does_is_a_reason(name: str, reason: str) -> None:
    verdict = grade(f"own_rewards:{name}", "x", "x", timeout_seconds=1.0)
    assert verdict.score is None
    assert reason in verdict.reason


def test_parts_are_finite_too() -> None:
    verdict = grade("own_rewards:parts", "x", "x")
    assert (verdict.parts, verdict.extracted) == ({"a": 0.5}, "e")


def test_a_reward_reads_prompt_metadata_and_options() -> None:
    assert grade("own_rewards:reads", "x", None, prompt="abc", metadata={"bonus": 1}, scale=2).score == 7.0


def test_the_process_is_kept_until_it_has_to_be_killed() -> None:
    first, second = (grade("own_rewards:pid", "x", None).score for _ in range(2))
    assert first == second
    assert grade("own_rewards:hang", "x", None, timeout_seconds=0.3).reason == "timeout"
    assert grade("own_rewards:pid", "x", None).score != first


def test_grading_works_in_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from milepost.tasks.rewards import grade\nprint(grade('exact', ' 5', 5).score)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("1.0\n", "")


def test_a_pattern_that_backtracks_for_ever_times_out() -> None:
    assert grade("regex", "a" * 40 + "b", "(a+)+c", timeout_seconds=0.5).reason == "timeout"
    assert "the pattern is '(': it is no regular expression" in grade("regex", "a", "(").reason
    assert "the pattern is None" in grade("regex", "a", None).reason


def test_text_that_is_not_unicode_is_graded_like_any_other() -> None:
    assert grade("exact", "\ud800", "\ud800").score == 1.0


def test_bounded_work_for_hostile_mathematics() -> None:
    assert grade("math", r"\boxed{9**9**9**9}", "5.5", timeout_seconds=5.0) == Verdict(
        0.0, {}, "undecidable", grader_id("math"), pytest.approx(0, abs=5), "9**9**9**9"
    )


def test_a_grader_names_its_code() -> None:
    name, _, digest = grader_id("math").partition("@")
    assert (name, len(digest)) == ("math", 8)
    (verdict,) = score(single("exact", {}).as_json(), [{"response": "a", "label": "a"}])
    assert verdict["grader"] == grader_id("exact")


def test_a_plan_refuses_what_no_sample_could_use() -> None:
    check_reward("math", {"boxed_only": True})
    with pytest.raises(LookupError, match="did you mean 'math'"):
        check_reward("maths", {})
    with pytest.raises(LookupError, match="no such module"):
        grade("nowhere:reward", "", "")
    with pytest.raises(LookupError, match="module 'own_rewards' has no 'absent'"):
        grade("own_rewards:absent", "", "")
    with pytest.raises(LookupError, match="cannot import '__main__'"):
        grade("__main__:reward", "", "")
    with pytest.raises(ValueError, match="has no option 'boxed_onyl', did you mean 'boxed_only'"):
        check_reward("math", {"boxed_onyl": True})
    with pytest.raises(ValueError, match="has no option 'patern', did you mean 'pattern'"):
        grade("regex", "", "", patern="a")
    with pytest.raises(ValueError, match=r"'length_penalty' lacks a value for \['buffer_tokens'\]"):
        check_reward("length_penalty", {"max_tokens": 8})
    with pytest.raises(ValueError, match="not a sample and"):
        check_reward("platform:node", {})


def test_that_nothing_could_be_scored_is_told_from_samples_that_could_not_be() -> None:
    bad, good = Verdict(None, reason="error: text", grader="own"), Verdict(0.0, grader="own")
    assert why_none([Verdict(None, reason="invalid"), bad, bad]) == "error: text"
    assert why_none([bad, good]) == why_none([Verdict(None, reason="invalid")]) == why_none([]) == ""
