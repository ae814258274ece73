"""Conversations with tools: what is given to the engine, what is stored, and where they end."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engines.local_graders import LocalGraders
from milepost.engines.tokenizer import Tokenizer
from milepost.router.client import GenerationStopped
from milepost.storage.parameters import RolloutSection
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.conversation import retokenized, turn_seed
from milepost.tasks.rollouts import RolloutParams, get_rollout
from milepost.tasks.samples import Prompt, Sample
from milepost.tasks.toolbox import toolbox
from milepost.tasks.tools import check_tools, tool_rules

from .talking import HERMES, TOOLS, Script, call_of, tokenizer_with

NAMES = ["add", "later", "hang", "die", "numbers"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(HERMES, tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalGraders]:
    with LocalGraders(workers=1) as found:
        yield found


class Talk:
    """Conversations of a script with the tools of this module."""

    def __init__(self, tokenizer: Tokenizer, processes: LocalGraders) -> None:
        self._tokenizer = tokenizer
        self._processes = processes
        self.prompt = self.prompt_of({})
        self.script = Script(tokenizer, [])

    def prompt_of(self, metadata: dict[str, Any]) -> Prompt:
        return Prompt("p", "g", "sums", "1+2=", self._tokenizer.render("1+2="), "3", metadata)

    def __call__(
        self, *replies: str | tuple[str, str], budget: int = 4000, context: int = 4000, **rules: Any
    ) -> Sample:
        chosen = RolloutSection(tools=[f"{TOOLS}:{name}" for name in NAMES], **rules)
        self.script = Script(self._tokenizer, replies)
        sampling = {"max_new_tokens": budget, "sampling_seed": 7, "temperature": 1.0}

        async def talk() -> Sample:
            found = tool_rules(chosen)
            assert found is not None
            params = RolloutParams("g-000", sampling, context, toolbox(found, self._tokenizer, [self._processes]))
            sample = await get_rollout("multi_turn")(self.script, self.prompt, params)
            assert isinstance(sample, Sample)
            return sample

        return asyncio.run(talk())


@pytest.fixture
def talk(tokenizer: Tokenizer, processes: LocalGraders) -> Talk:
    return Talk(tokenizer, processes)


def told(sample: Sample) -> list[str]:
    """What tools said."""
    return [message["content"] for message in sample.metadata["conversation"] if message["role"] == "tool"]


def test_an_answer_without_a_call_is_one_turn(talk: Talk) -> None:
    sample = talk("3")
    assert (sample.response, sample.turns, sample.finish_reason) == ("3", 1, "stop")
    assert sample.loss_mask == [1, 1] and sample.metadata["ended_by"] == "answer"
    assert sample.metadata["tool_calls"] == 0 and sample.metadata["tools"][0]["function"]["name"] == "add"


def test_the_engine_is_given_what_it_said_and_the_increment_and_nothing_else(talk: Talk, tokenizer: Tokenizer) -> None:
    sample = talk(call_of("add", left=1, right=2), call_of("later", text="so"), "3")
    first, second, third = (request.input_ids for request in talk.script.requests)
    (end,) = tokenizer.eos_ids
    called = [*tokenizer.encode(call_of("add", left=1, right=2)), end]
    assert first == talk.prompt.token_ids
    assert second == [*first, *called, *tokenizer.encode("\ntool: 3"), end, *tokenizer.encode("\nassistant: ")]
    assert third[: len(second)] == second
    assert [*talk.prompt.token_ids, *sample.token_ids] == [*third, *tokenizer.encode("3"), end]
    assert sample.metadata["retokenized"] == 0


def test_what_tools_say_is_not_trained_and_has_no_logprob(talk: Talk, tokenizer: Tokenizer) -> None:
    sample = talk(call_of("add", left=1, right=2), "3")
    masked = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if not mask]
    assert tokenizer.decode(masked, skip_special_tokens=False) == "\ntool: 3<eos>\nassistant: "
    assert {(mask, logprob) for mask, logprob in zip(sample.loss_mask, sample.logprobs, strict=True)} == {
        (1, -0.5),
        (0, 0.0),
    }
    assert (sample.response, sample.turns) == ("3", 2)
    assert (sample.first_version.step, sample.last_version.step) == (1, 2)


def test_calls_of_one_answer_are_all_made_and_told_in_order(talk: Talk) -> None:
    sample = talk(call_of("add", left=1, right=2) + call_of("numbers", count=3), "3")
    assert told(sample) == ["3", "[0, 1, 2]"]
    assert (sample.metadata["tool_calls"], sample.metadata["tool_errors"]) == (2, 0)


FAILURES = [
    (call_of("subtract", left=1), "error: there is no tool 'subtract' tools: ['add'"),
    (call_of("ad", left=1), "error: there is no tool 'ad', did you mean 'add'?"),
    (call_of("add", left=1), "error: TypeError: add() missing 1 required positional argument: 'right'"),
    (call_of("add", left=1, right="x"), "error: TypeError: unsupported operand"),
    ("<tool_call>add(1, 2)</tool_call>", "error: the call is not JSON"),
    (call_of("hang"), "error: hang took longer than 0.5 s"),
    (call_of("die"), "error: die ended its process"),
]


@pytest.mark.parametrize(("said", "problem"), FAILURES)
def test_a_call_that_fails_is_told_to_the_model(talk: Talk, said: str, problem: str) -> None:
    sample = talk(said, "sorry", tool_timeout_seconds=0.5)
    assert told(sample)[0].startswith(problem)
    assert sample.metadata["tool_errors"] == 1 and sample.response == "sorry"


def test_a_prompt_with_tools_of_its_own_may_call_no_others(talk: Talk) -> None:
    talk.prompt = talk.prompt_of({"tools": [{"type": "function", "function": {"name": "later"}}]})
    sample = talk(call_of("add", left=1, right=2), "3")
    assert told(sample)[0].startswith("error: there is no tool 'add' tools: ['later']")


def test_the_last_turn_calls_nothing_and_counts_as_truncated(talk: Talk) -> None:
    sample = talk(call_of("add", left=1, right=2), call_of("add", left=3, right=4), max_turns=2)
    assert (sample.turns, told(sample), sample.finish_reason) == (2, ["3"], "length")
    assert sample.metadata["ended_by"] == "max_turns"


def test_all_answers_share_one_budget_and_results_are_not_of_it(talk: Talk) -> None:
    call = call_of("add", left=1, right=2)
    sample = talk(call, ("1234", "length"), budget=len(call) + 1 + 4)
    assert [request.sampling["max_new_tokens"] for request in talk.script.requests] == [len(call) + 5, 4]
    assert (sample.finish_reason, sample.metadata["ended_by"]) == ("length", "max_new_tokens")
    assert sample.response == "1234" and sum(sample.loss_mask) == len(call) + 5


def test_a_call_that_spent_the_budget_is_not_made(talk: Talk) -> None:
    call = call_of("add", left=1, right=2)
    sample = talk(call, budget=len(call) + 1)
    assert (sample.turns, told(sample), sample.metadata["ended_by"]) == (1, [], "max_new_tokens")


def test_a_result_that_does_not_fit_the_context_ends_the_conversation_before_it(talk: Talk) -> None:
    sample = talk(call_of("numbers", count=500), context=500)
    assert (sample.finish_reason, sample.metadata["ended_by"]) == ("length", "context_length")
    assert told(sample) == [] and all(sample.loss_mask)
    assert talk.script.requests[0].sampling["max_new_tokens"] == 500 - len(talk.prompt.token_ids)


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_what_was_said_before_the_engine_stopped_is_kept(talk: Talk, reason: str) -> None:
    sample = talk(call_of("add", left=1, right=2), ("1", reason))
    assert (sample.finish_reason, sample.turns, sample.response) == (reason, 2, "1")
    assert told(sample) == ["3"]


def test_a_conversation_that_is_stopped_between_answers_keeps_them(talk: Talk) -> None:
    sample = talk(call_of("add", left=1, right=2))
    assert (sample.finish_reason, sample.turns, told(sample)) == ("abort", 1, ["3"])
    with pytest.raises(GenerationStopped):
        talk()


def test_each_turn_has_a_seed_of_its_own_and_the_first_that_of_the_sample(talk: Talk) -> None:
    talk(call_of("add", left=1, right=2), "3")
    seeds = [request.sampling["sampling_seed"] for request in talk.script.requests]
    assert seeds == [7, turn_seed(7, 1)] and seeds[1] != turn_seed(7, 2) != turn_seed(8, 2)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9))), min_size=1))
def test_tokens_that_are_given_as_they_were_are_no_drift(turns: Sequence[tuple[list[int], list[int]]]) -> None:
    asked: list[list[int]] = [[]]
    for said, told in turns:
        asked.append([*asked[-1], *said, *told])
    assert retokenized(asked, [said for said, _ in turns]) == 0


def test_drift_is_counted_by_the_token() -> None:
    assert retokenized([[1, 2], [1, 2, 3, 5, 9]], [[3, 4]]) == 1
    assert retokenized([[1, 2], [1, 2]], [[3, 4]]) == 2


REFUSED = [
    ({"function": "multi_turn"}, "rollout.tools is empty: name functions"),
    ({"tools": [f"{TOOLS}:add"]}, "rollout.function 'single_turn' calls none"),
    ({"function": "multi_turn", "tools": [f"{TOOLS}:undescribed"]}, "needs type hints, and a docstring"),
    ({"function": "multi_turn", "tools": [f"{TOOLS}:nothing"]}, "has no 'nothing'"),
    ({"function": "multi_turn", "tools": [f"{TOOLS}:add", f"{TOOLS}:add"]}, "have one name"),
    ({"function": "multi_turn", "tools": [f"{TOOLS}:os"]}, "must be a function"),
]


@pytest.mark.parametrize(("section", "reason"), REFUSED)
def test_tools_that_nobody_could_call_are_refused_before_the_run(section: dict[str, Any], reason: str) -> None:
    with pytest.raises((ValueError, LookupError), match=reason):
        check_tools(RolloutSection(**section))


def test_a_conversation_is_json(talk: Talk) -> None:
    assert json.loads(json.dumps(talk("3").metadata))["conversation"] == [{"role": "assistant", "content": "3"}]


def test_a_sample_has_no_log_probability_that_is_not_finite() -> None:
    version = WeightVersion(0, "ab")
    with pytest.raises(ValueError, match="a sample has a log-probability of nan: give those that"):
        Sample("1", [4, 5], [-0.5, float("nan")], [1, 1], "stop", version, version)
