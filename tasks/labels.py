"""Whether the labels of a prompt set can be graded, asked before a run begins and not at the step that meets them.

Rewards are asked in a process of their own, like everything that reads what comes from outside.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from milepost.engines.grader_process import Call, GraderProcess
from milepost.storage.files import canonical_json
from milepost.storage.messages import shown
from milepost.storage.parameters import RewardSection
from milepost.tasks.prompt_reward import choice_for, chosen
from milepost.tasks.rewards import checks_labels

LABEL_PROBLEM = "milepost.tasks.rewards:label_problem"
SECONDS = 30.0  # for one label; the first of a reward pays for its imports


class LabelCheck:
    """Asks the reward of each prompt whether it can grade the label; used as a block, which ends its process."""

    def __init__(self, reward: RewardSection, *, seconds: float = SECONDS) -> None:
        self._reward = reward
        self._seconds = seconds
        self._indifferent = {part.name for part in chosen(reward).parts if not checks_labels(part.name)}
        self._grader = GraderProcess()

    def __enter__(self) -> "LabelCheck":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._grader.close()

    def __call__(self, asked: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[str]:
        """Why each of the labels, with the metadata of its prompt, cannot be graded; empty for one that can."""
        by_prompt = [self._calls(label, metadata) for label, metadata in asked]
        different = {_key(call): call for calls in by_prompt for call in calls}
        answers = self._grader.ask_all(list(different.values()), timeout_seconds=self._seconds)
        problems = {
            key: _problem(call, answer.reason, answer.value)
            for (key, call), answer in zip(different.items(), answers, strict=True)
        }
        found = [[problems[_key(call)] for call in calls] for calls in by_prompt]
        return [next((problem for problem in said if problem), "") for said in found]

    def _calls(self, label: Any, metadata: Mapping[str, Any]) -> list[Call]:
        """One for every reward that scores the prompt, but for those that take any label."""
        parts = (part for part in choice_for(metadata, self._reward).parts if part.name not in self._indifferent)
        return [Call(LABEL_PROBLEM, (part.name, label, dict(part.options))) for part in parts]


def _key(call: Call) -> str:
    return canonical_json(call.args)


def _problem(call: Call, reason: str | None, said: str) -> str:
    name, label, _ = call.args
    problem = said if reason is None else reason.removeprefix("error: ")
    return f"reward {name!r} cannot grade label {shown(label)}: {problem}" if problem else ""
