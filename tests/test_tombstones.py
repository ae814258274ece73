"""What is left of a purged prompt in a table, and what is not."""

import json
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage.schema import PROMPTS, ROLLOUTS, from_rows
from milepost.storage.tables import encode
from milepost.storage.tombstones import entombed, purged_rows

KEPT = ["run_id", "step", "shard", "group_id", "sample_id", "prompt_id", "dataset", "loss_mask", "finish_reason"]
KEPT += ["status", "weights_digest", "turns", "seed", "reward", "rewards", "kept", "drop_reason", "advantages"]
SAID = "Zq-said-"


def sample(number: int, prompt: str, tokens: int, *, scored: bool = True, trained: bool = True) -> dict[str, Any]:
    verdict = {"score": 1.0, "parts": {}, "reason": f"{SAID}why", "grader": "g@1", "extracted": f"{SAID}answer"}
    numbers = [-1.5] * tokens
    return {
        **{"run_id": "r", "step": 0, "shard": 0, "group_id": "g", "sample_id": f"s{number}", "prompt_id": prompt},
        **{"dataset": "d", "prompt": json.dumps(f"{SAID}{prompt}"), "prompt_token_ids": [70_001] * 3},
        **{"label": json.dumps(f"{SAID}label"), "response": f"{SAID}response", "response_escaped": number % 2 == 0},
        **{"response_token_ids": [70_001] * tokens, "loss_mask": [1] * tokens, "rollout_logprobs": numbers},
        **{"finish_reason": "stop", "status": "completed", "turns": 1, "seed": 1, "sampling": "{}"},
        **{"metadata": json.dumps({"m": f"{SAID}meta"}), "weights_digest": "w", "kept": True},
        **({"reward": 1.0, "rewards": [("p", 1.0)], "verdict": json.dumps(verdict)} if scored else {}),
        **({"advantages": numbers, "old_logprobs": numbers, "ref_logprobs": numbers} if trained else {}),
    }


samples = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=8
)


@given(samples, st.sets(st.sampled_from("abc")))
def test_ids_counts_and_rewards_stay_and_words_go(rows: list[tuple[str, int, bool, bool]], purged: set[str]) -> None:
    made = [
        sample(at, prompt, tokens, scored=scored, trained=trained)
        for at, (prompt, tokens, scored, trained) in enumerate(rows)
    ]
    table = from_rows(made, ROLLOUTS)
    left = entombed(table, purged)
    assert left.select(KEPT).equals(table.select(KEPT)) and left.schema == table.schema
    assert entombed(left, purged).equals(left)
    gone = left.filter(pa.array([prompt in purged for prompt, *_ in rows]))
    assert SAID not in str(gone.to_pylist()) and "70001" not in str(gone.to_pylist())
    stays = pa.array([prompt not in purged for prompt, *_ in rows])
    assert left.filter(stays).equals(table.filter(stays))
    assert purged_rows(left).to_pylist() == [prompt in purged for prompt, *_ in rows]
    lengths = [[len(row[name] or []) for row in left.to_pylist()] for name in ("response_token_ids", "old_logprobs")]
    assert lengths == [[len(row.get(name) or []) for row in made] for name in ("response_token_ids", "old_logprobs")]


def test_a_verdict_keeps_what_it_scored_and_by_which_code() -> None:
    (row,) = entombed(from_rows([sample(0, "a", 2)], ROLLOUTS), ["a"]).to_pylist()
    said = {"score": 1.0, "parts": {}, "reason": "purged", "grader": "g@1", "extracted": None}
    assert json.loads(row["verdict"]) == said
    assert (row["prompt"], row["response"], row["metadata"]) == ('"[purged]"', "[purged]", "{}")


def test_the_bytes_of_a_table_of_tombstones_have_nothing_of_what_was_said() -> None:
    prompts = [
        {"prompt_id": name, "group_id": "", "dataset": "d", "row": at, "epoch": 0, "prompt": json.dumps(SAID + name)}
        | {"prompt_token_ids": [70_001], "label": json.dumps(SAID), "metadata": "{}"}
        for at, name in enumerate("ab")
    ]
    data = encode(entombed(from_rows(prompts, PROMPTS), "ab"))
    assert SAID.encode() not in data and (70_001).to_bytes(4, "little") not in data
