"""Which reward scores a sample: sums of several, calls for groups and batches, and prompts that name their own."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.local_graders import LocalGraders
from milepost.flows.recipe import load_recipe
from milepost.storage.parameters import EvalSet, RewardPart, RewardSection
from milepost.tasks.grading import grade_rows, require_reward
from milepost.tasks.prompt_reward import choice_for, chosen, of_eval_set
from milepost.tasks.reward_choice import RewardChoice, single
from milepost.tasks.rewards import check_reward
from milepost.tasks.scoring import choice_id, score
from milepost.tasks.verdict import Verdict

OWN = """
from milepost.tasks.scoring import in_batches
from milepost.tasks.verdict import Verdict

def length(sample): return Verdict(len(sample.response), {"tokens": sample.response_tokens or 0}, extracted="l")
def breaks(sample): return {"good": 1}[sample.response]
def nothing(sample): return Verdict(None, reason="no idea")
def rank(samples): return [sorted(s.response for s in samples).index(s.response) / len(samples) for s in samples]
def size(samples): return [len(samples)] * len(samples)
def short(samples): return [1.0]
def lone(samples): return 1.0
async def later(samples): return [Verdict(None, reason="late")] + [1.0] * (len(samples) - 1)

@in_batches(3)
def many(samples): return [len(samples)] * len(samples)
"""


@pytest.fixture(scope="module", autouse=True)
def own_rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "chosen_rewards.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def own(name: str) -> str:
    return f"chosen_rewards:{name}"


def rows(*responses: str, group: str = "g") -> list[dict[str, Any]]:
    return [{"response": text, "label": "a", "group_id": group, "response_tokens": len(text)} for text in responses]


def summed(*parts: tuple[str, float]) -> RewardChoice:
    return chosen(RewardSection(parts=[RewardPart(name=name, weight=weight) for name, weight in parts]))


def scored(choice: RewardChoice, asked: list[dict[str, Any]]) -> list[Verdict]:
    return [Verdict(**said) for said in score(choice.as_json(), asked)]


def test_a_sum_weighs_its_parts_and_names_them() -> None:
    first, second = scored(summed(("exact", 1.0), (own("length"), -0.5)), rows("a", "bb"))
    assert (first.score, second.score) == (0.5, -1.0)
    assert second.parts == {"exact": 0.0, own("length"): 2.0, f"{own('length')}/tokens": 2.0}
    assert second.extracted == "bb" and second.grader == choice_id(summed(("exact", 9.0), (own("length"), 1.0)))


def test_a_sum_lacks_a_score_where_one_of_its_parts_does() -> None:
    (verdict,) = scored(summed(("exact", 1.0), (own("nothing"), 0.0)), rows("a"))
    assert (verdict.score, verdict.parts, verdict.reason) == (None, {"exact": 1.0}, f"{own('nothing')}: no idea")


def test_parts_of_one_name_are_told_apart() -> None:
    (verdict,) = scored(summed(("exact", 1.0), ("exact", 2.0)), rows("a"))
    assert (verdict.score, verdict.parts) == (3.0, {"exact": 1.0, "exact-2": 1.0})


def test_a_reward_of_samples_is_called_with_all_of_them() -> None:
    assert [verdict.score for verdict in scored(single(own("rank"), {}), rows("b", "a"))] == [0.5, 0.0]
    late, one = scored(single(own("later"), {}), rows("b", "a"))
    assert (late.reason, one.score) == ("late", 1.0)


@pytest.mark.parametrize(("name", "said"), [("short", "returned 1 verdicts"), ("lone", "returned 1.0")])
def test_a_group_gets_a_verdict_for_each_or_none(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} for 2 samples, it must return one each"):
        score(single(own(name), {}).as_json(), rows("a", "b"))


def test_in_a_group_a_reward_that_fails_on_one_sample_costs_no_other_its_score() -> None:
    good, bad = scored(summed((own("size"), 1.0), (own("breaks"), 1.0)), rows("good", "bad"))
    assert good.score == 3.0
    assert (bad.score, bad.reason) == (None, f"{own('breaks')}: error: KeyError: 'bad'")


def test_a_prompt_may_name_its_reward() -> None:
    section = RewardSection(name="math", options={"boxed_only": True})
    assert choice_for({}, section) == choice_for({"reward": 0.5}, section) == single("math", {"boxed_only": True})
    assert choice_for({"reward": "math"}, section) == single("math", {"boxed_only": True})
    assert choice_for({"rm_type": "exact"}, section) == single("exact", {})
    assert choice_for({"reward": "regex", "rm_type": "exact"}, section) == single("regex", {})
    assert choice_for({"rm_type": "exact"}, section.model_copy(update={"by_prompt": False})).name == "math"
    with_parts = RewardSection(parts=[RewardPart(name="exact")])
    assert choice_for({"reward": "math"}, with_parts) == single("math", {})


def test_only_what_asks_others_has_the_network_unless_told() -> None:
    assert not single("math", {}).network
    assert single("remote", {}).network and single("boxed_judge", {}).network
    assert summed(("math", 1.0), ("judge", 0.1)).network
    assert chosen(RewardSection(network=True)).network


def test_a_set_that_names_its_reward_is_scored_by_nothing_else() -> None:
    section = RewardSection(parts=[RewardPart(name="exact")], timeout_seconds=3)
    named = of_eval_set(EvalSet(path="a.jsonl", reward="regex", reward_options={"search": True}), section)
    assert choice_for({"reward": "math"}, named) == single("regex", {"search": True})
    assert named.timeout_seconds == 3 and of_eval_set(EvalSet(path="a.jsonl"), section) == section


def test_parts_come_from_the_command_line_like_all_else() -> None:
    parts = [{"name": "math"}, {"name": "regex", "weight": 0.1, "options": {"pattern": "<answer>", "search": True}}]
    found, _ = load_recipe(None, [f"reward.parts={json.dumps(parts)}", "reward.memory_bytes=536870912"])
    assert [(part.name, part.weight) for part in found.reward.parts] == [("math", 1.0), ("regex", 0.1)]
    with pytest.raises(ValueError, match="memory_bytes"):
        load_recipe(None, ["reward.memory_bytes=1"])


def test_what_takes_samples_is_checked_like_what_takes_one() -> None:
    check_reward(own("rank"), {})
    with pytest.raises(ValueError, match="has no option 'scale'"):
        check_reward(own("rank"), {"scale": 1})


@pytest.mark.slow
def test_a_pool_calls_once_a_group_and_in_batches_across_groups() -> None:
    asked = [*rows("a", "b", group="1"), *rows("c", group="2"), *rows("d", group="1")]

    async def sizes(name: str) -> list[float | None]:
        said = await grade_rows(graders, single(own(name), {}), asked, timeout_seconds=10)
        return [verdict.score for verdict in said]

    with LocalGraders(workers=2) as graders:
        assert asyncio.run(sizes("size")) == [3, 3, 1, 3]
        assert asyncio.run(sizes("many")) == [3, 3, 3, 1]
        assert asyncio.run(sizes("length")) == [1, 1, 1, 1]
        missing = asyncio.run(grade_rows(graders, single(own("gone"), {}), asked, timeout_seconds=10))
        assert all("has no 'gone'" in verdict.reason for verdict in missing)
        with pytest.raises(ValueError, match="reward 'exact' has no option 'x'"):
            asyncio.run(require_reward(graders, RewardSection(parts=[RewardPart(name="exact", options={"x": 1})])))


@pytest.mark.slow
def test_a_group_has_the_time_of_all_its_samples_and_is_lost_together(tmp_path: Path) -> None:
    (tmp_path / "slow_rewards.py").write_text(
        "import time\ndef slow(samples): time.sleep(0.2 * len(samples) if samples[0].label == 'a' else 60); "
        "return [1.0] * len(samples)\n"
    )
    sys.path.insert(0, str(tmp_path))
    lost = [row | {"label": "b"} for row in rows("x", "y", group="2")]
    with LocalGraders(workers=1) as graders:
        asked = grade_rows(graders, single("slow_rewards:slow", {}), rows("a", "b") + lost, timeout_seconds=0.5)
        verdicts = asyncio.run(asked)
    sys.path.remove(str(tmp_path))
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, None, None]
    assert [verdict.reason for verdict in verdicts[2:]] == ["timeout", "timeout"]
