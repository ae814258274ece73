"""Collecting groups: what is refused, made again, cut short and gone on with, one sample at a time."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.grader_process import Answer
from milepost.engines.protocols import Completion, GenerateRequest, WeightVersion
from milepost.flows.plan import check_collection
from milepost.router.client import GenerationStopped
from milepost.router.completions import UnsoundCompletion, parse_completion
from milepost.storage.batch_plan import BatchPlan
from milepost.storage.journal import StepStore
from milepost.storage.parameters import FilterSection, Parameters, RewardSection, RolloutSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.tasks.asking import Asking
from milepost.tasks.carried import Carried, Earlier, earlier_samples, go_on
from milepost.tasks.early_stop import EarlyStop
from milepost.tasks.generate import Collection, generate_rows, require_sound
from milepost.tasks.rewards import CHECK
from milepost.tasks.rollouts import RolloutParams, single_turn
from milepost.tasks.samples import Prompt, Sample
from milepost.tasks.sampling import Sampling
from milepost.tasks.score_ahead import ScoreAhead

OLD, NOW = WeightVersion(3, "aa"), WeightVersion(4, "bb")
PLACE = {"run_id": "run", "step": 4, "shard": 0}
SAMPLING = Sampling("single_turn", {"max_new_tokens": 20}, 2, 64, 0)


def prompt(group: str = "g") -> Prompt:
    return Prompt("p", group, "set", "1+1=", [1, 2, 3], "2", {})


def completion(ids: Sequence[int], finish: Any = "stop") -> Completion:
    return Completion("x" * len(ids), list(ids), [-0.5] * len(ids), finish, NOW, NOW)


def unsound(reason: str = "2 tokens came with 1 log-probabilities") -> UnsoundCompletion:
    return UnsoundCompletion("s", reason, text="ab", ids=[7, 8], finish_reason="stop")


class Script:
    """Generate that answers, or raises, as told; `asked` are the requests."""

    def __init__(self, *answers: Completion | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def rows_of(script: Script, sampling: Sampling = SAMPLING, **more: Any) -> list[dict[str, Any]]:
    return asyncio.run(Asking(script, single_turn, sampling, NOW, **more).rows(prompt(), 0))


ANSWER: dict[str, Any] = {
    "text": "ab",
    "output_ids": [7, 8],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 8},
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
        "weight_version": "4-bb",
    },
}


@pytest.mark.parametrize(
    ("changes", "ids", "reason"),
    [
        ({"output_token_logprobs": [[-0.5, 7, None]]}, [7, 8], "2 tokens came with 1 log-probabilities"),
        ({"output_token_logprobs": [[-0.5, 7, None], [float("nan"), 8, None]]}, [7, 8], "log-probability nan"),
        ({"weight_version": None}, [7, 8], "the weight version is None"),
        ({"weight_version": "default"}, [7, 8], "'default' is not a weight version"),
        ({}, [7, 9], "it is 9|token 1 is 9, its log-probability is of 8"),
        ({}, [7, 16], "token 1 is 16, which is not in the vocabulary of 16 tokens"),
        ({}, [7, -1], "token 1 is -1, which is not in the vocabulary"),
        ({"finish_reason": {"type": "stop", "matched": 5}}, [7, 8], "it stopped at token 5, and ends with .8."),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, [7, 8], "output is not a number"),
    ],
)
def test_a_completion_that_cannot_be_trained_on_says_why(changes: dict[str, Any], ids: list[int], reason: str) -> None:
    answer = {**ANSWER, "output_ids": ids, "meta_info": {**ANSWER["meta_info"], **changes}}
    with pytest.raises(UnsoundCompletion, match=f"sample 's': .*({reason})"):
        parse_completion("s", answer, vocabulary=16)
    assert parse_completion("s", ANSWER, vocabulary=16).output_ids == [7, 8]


def test_it_is_stored_as_invalid_without_numbers_that_nobody_gave() -> None:
    (row,) = rows_of(Script(unsound()))
    found = from_rows([PLACE | row], ROLLOUTS).to_pylist()[0]
    assert (found["status"], found["response_token_ids"], found["loss_mask"]) == ("invalid", [7, 8], [0, 0])
    assert found["rollout_logprobs"] is found["weights_digest"] is None
    assert found["metadata"] == '{"invalid": "2 tokens came with 1 log-probabilities"}'


def test_a_shard_of_nothing_but_invalid_samples_is_the_engines_fault() -> None:
    rows = [PLACE | rows_of(Script(answer))[0] for answer in (unsound(), unsound())]
    with pytest.raises(ValueError, match="all 2 samples of a shard are invalid; the first: 2 tokens came with 1"):
        require_sound(from_rows(rows, ROLLOUTS))


def test_a_lost_sample_is_made_again_with_another_seed_and_its_tokens_are_counted() -> None:
    script = Script(unsound(), completion([7, 8, 9], "abort"), completion([5]))
    (row,) = rows_of(script, replace(SAMPLING, refills=3))
    assert (row["status"], row["response_token_ids"]) == ("completed", [5])
    assert row["metadata"] == '{"refills": 2, "lost_tokens": 5}'
    assert len({request.sampling["sampling_seed"] for request in script.asked}) == 3
    assert {request.sample_id for request in script.asked} == {row["sample_id"]}


def test_a_sample_that_is_lost_each_time_stays_lost() -> None:
    (row,) = rows_of(Script(*[completion([7], "abort")] * 4), replace(SAMPLING, refills=3))
    assert row["status"] == "aborted" and '"refills": 3' in row["metadata"]


def earlier(tokens: int, finish: str = "abort") -> Earlier:
    ids = list(range(1, tokens + 1))
    return Earlier(Sample("y" * tokens, ids, [-1.0] * tokens, [1] * tokens, finish, OLD, OLD), seed=11)


@pytest.mark.parametrize("masked", [True, False])
def test_ten_tokens_and_five_more_have_fifteen_and_a_mask_as_asked(masked: bool) -> None:
    script = Script(completion([50, 51, 52, 53, 54]))
    sampling = replace(SAMPLING, partial=True, mask_older_tokens=masked)
    (row,) = rows_of(script, sampling, earlier={"g-000": earlier(10)})
    assert row["loss_mask"] == [0 if masked else 1] * 10 + [1] * 5
    assert len(row["response_token_ids"]) == len(row["rollout_logprobs"]) == 15
    assert (row["response"], row["weight_version_min"], row["weight_version_max"]) == ("y" * 10 + "x" * 5, 3, 4)
    (request,) = script.asked
    assert request.input_ids == [1, 2, 3, *range(1, 11)] and request.sampling["max_new_tokens"] == 10


def test_a_sample_that_was_finished_is_taken_as_it_is() -> None:
    script = Script()
    (row,) = rows_of(script, replace(SAMPLING, partial=True), earlier={"g-000": earlier(4, "stop")})
    assert script.asked == [] and (row["status"], row["seed"], row["weight_version_max"]) == ("completed", 11, 3)


@pytest.mark.parametrize(("limit", "context"), [(10, 64), (99, 13)])
def test_one_without_room_for_another_token_is_truncated_without_a_request(limit: int, context: int) -> None:
    params, script = RolloutParams("s", {"max_new_tokens": limit}, context), Script()
    found = asyncio.run(go_on(script, single_turn, prompt(), params, earlier(10).sample))
    assert found.finish_reason == "length" and len(found.token_ids) == 10 and script.asked == []


def test_one_that_is_stopped_again_keeps_what_it_had() -> None:
    (row,) = rows_of(Script(GenerationStopped("s")), replace(SAMPLING, partial=True), earlier={"g-000": earlier(4)})
    assert row["status"] == "aborted" and row["response_token_ids"] == [1, 2, 3, 4]


def test_what_was_lost_of_a_continuation_is_what_it_generated_itself() -> None:
    script = Script(completion([7], "abort"), unsound(), completion([5]))
    (row,) = rows_of(script, replace(SAMPLING, partial=True, refills=3), earlier={"g-000": earlier(4)})
    assert row["response_token_ids"] == [1, 2, 3, 4, 5] and '"lost_tokens": 3' in row["metadata"]


def test_tokens_that_a_step_lost_are_not_counted_again_by_the_step_that_goes_on(tmp_path: Path) -> None:
    (row,) = rows_of(Script(completion([7], "abort"), completion([5])), replace(SAMPLING, refills=3))
    assert '"lost_tokens": 1' in row["metadata"]
    table = from_rows([PLACE | row], ROLLOUTS)
    carried = Carried({"h": "g"}, (StepStore(str(tmp_path), "run", 4).write("rollouts", table, ROLLOUTS),))
    assert earlier_samples(carried, ["h"])["h-000"].sample.metadata == {}


class Slots:
    """Generate that counts which groups are in flight together."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.most_groups = self.most = 0

    async def __call__(self, request: GenerateRequest) -> Completion:
        group = request.sample_id.rpartition("-")[0]
        self.running.append(group)
        self.most_groups = max(self.most_groups, len(set(self.running)))
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(0.02 if request.sample_id.endswith("0") else 0.0)
        self.running.remove(group)
        return completion([1])


@pytest.mark.parametrize(("by_group", "groups"), [(True, 2), (False, 4)])
def test_a_group_is_submitted_whole_or_sample_by_sample(by_group: bool, groups: int) -> None:
    slots = Slots()
    prompts = [prompt(f"g{index}") for index in range(8)]
    asking = Asking(slots, single_turn, SAMPLING, NOW)
    rows = asyncio.run(generate_rows(asking, prompts, Collection(4, by_group), place=PLACE))
    assert [row["sample_id"] for row in rows] == [f"g{group}-{index:03d}" for group in range(8) for index in range(2)]
    assert slots.most <= 4 and slots.most_groups == groups


class Judge:
    """Graders that score every sample 1, and never answer for the group `slow`; their first checks fail as told."""

    def __init__(self, *failures: str) -> None:
        self.failures = list(failures)
        self.checks = 0

    async def map(self, function: str, items: Sequence[Sequence[Any]], **_: Any) -> list[Answer]:
        if function == CHECK:
            self.checks += 1
            return [Answer(1, self.failures.pop(0) if self.failures else None, 0.0)]
        if any(row["group_id"] == "slow" for _, rows in items for row in rows):
            await asyncio.Event().wait()
        return [Answer([{"score": 1.0} for _ in rows], None, 0.0) for _, rows in items]


def test_enough_groups_end_a_round_though_a_verdict_is_still_to_come() -> None:
    async def collect() -> tuple[EarlyStop, list[dict[str, Any]]]:
        early = EarlyStop(2, RewardSection(name="random"), FilterSection(), graders=Judge())
        asking = Asking(Slots(), single_turn, SAMPLING, NOW, stop=early.event)
        prompts = [prompt(name) for name in ("slow", "a", "b")]
        async with asyncio.timeout(10):
            return early, await generate_rows(asking, prompts, Collection(8, early=early), place=PLACE)

    early, rows = asyncio.run(collect())
    assert early.judged == {"a", "b"} and len(early.verdicts) == 4
    assert [row["status"] for row in rows] == ["interrupted"] * 2 + ["completed"] * 4
    assert [row["finish_reason"] for row in rows] == ["stop"] * 6  # what was made of them is kept


def test_graders_are_checked_once_however_many_groups_are_finished_one_by_one() -> None:
    judge = Judge("crash")
    (row,) = rows_of(Script(completion([7])))

    async def verdicts() -> list[float | None]:
        async with ScoreAhead(RewardSection(name="random"), judge) as ahead:
            for group in ("a", "b", "c"):
                ahead.finished([PLACE | row | {"group_id": group, "sample_id": group}])
            return [said.score for said in (await ahead.verdicts()).values()]

    assert asyncio.run(verdicts()) == [None, 1.0, 1.0]
    assert judge.checks == 2


def test_groups_that_a_resumed_round_has_kept_already_count() -> None:
    early = EarlyStop(3, RewardSection(), FilterSection(), graders=Judge())
    early.found(0, 2)
    assert not early.event.is_set()
    early.found(1, 1)
    assert early.event.is_set()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"partial": True, "function": "multi_turn"}, "rollout.function is 'multi_turn': set rollout.partial=false or"),
        ({"over_sampling_batch_size": 4}, "over_sampling_batch_size 4 is less than data.rollout_batch_size 8"),
    ],
)
def test_what_cannot_be_collected_so_is_refused(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_collection(Parameters(rollout=RolloutSection(**rollout)), BatchPlan(8, 2, 16, 1))
