"""Runs whose samples are conversations with tools: through the whole DAG, verified, replayed and shown."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.fleet import Fleet, fleet
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer
from milepost.engines.tool_turns import tool_message
from milepost.flows.iteration import iteration
from milepost.flows.loop import recover
from milepost.flows.replay import replay
from milepost.flows.sample_view import find_sample, turns
from milepost.flows.start import Launched, begin_run
from milepost.storage import manifest, runs
from milepost.storage.documents import documents, with_messages
from milepost.storage.foreign import ForeignSample
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.storage.verify import verify
from milepost.tasks.tool_prompts import tool_prompts

from .talking import HERMES, TOOLS, call_of, tokenizer_with
from .test_train_fake import parameters, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

CALL, ANSWER = call_of("add", left=1, right=2), "3"


@pytest.fixture(scope="module")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose chat template knows tools."""
    folder = tmp_path_factory.mktemp("talking")
    vocabulary = tokenizer_with(HERMES, folder).vocab_size
    write_tiny_model(str(folder), vocab_size=vocabulary, hidden=64, layers=2, heads=4, kv_heads=2, seed=0)
    return str(folder)


def talking(model_dir: str, base: Path, *overrides: str) -> Parameters:
    path = base / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number}+2=", "label": "3"}) + "\n" for number in range(8)))
    tools = ["rollout.function=multi_turn", f'rollout.tools=["{TOOLS}:add","{TOOLS}:later"]', "rollout.max_turns=4"]
    lengths = ["model.context_length=1024", "rollout.max_new_tokens=400", "data.apply_chat_template=true"]
    return parameters(model_dir, str(path), *tools, *lengths, "reward.name=exact", *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, talking_model: str) -> RunFolder:
    """A step of a fake engine that calls two tools at once, then one that is not there, and then answers."""
    base = tmp_path_factory.mktemp("conversations")
    tokenizer = load_tokenizer(talking_model)
    (end,) = tokenizer.eos_ids
    said = [CALL + call_of("later", text="so"), call_of("subtract"), ANSWER]
    replies = [[*tokenizer.encode(text), end] for text in said]
    chosen = talking(talking_model, base)
    found = runs.run_folder(str(base / "runs"), "talks")
    launched = begin_run(str(base / "runs"), found, 1, chosen, fence=0)
    with fleet("talks", chosen, talking_model, engine_options={"replies": replies}) as engines:
        asyncio.run(_one_step(launched, engines))
    return found


async def _one_step(launched: Launched, engines: Fleet) -> None:
    step, position = await recover(launched, engines)
    await iteration(launched.root, launched.folder.run_id, step, position)


def samples(folder: RunFolder, stage: str) -> list[dict[str, Any]]:
    commits = manifest.load(folder, 0).commits
    refs = [ref for entry in commits if entry["slot"].startswith(stage) for ref in entry["tables"].values()]
    return [row for ref in refs for row in read_table(TableRef(**ref)).to_pylist()]


def test_every_sample_is_the_conversation_that_was_had(folder: RunFolder, talking_model: str) -> None:
    tokenizer = load_tokenizer(talking_model)
    found = samples(folder, "filter")
    assert len(found) == 16 and {(row["turns"], row["status"], row["response"]) for row in found} == {
        (3, "completed", "3")
    }
    for row in found:
        whole = tokenizer.decode(row["response_token_ids"], skip_special_tokens=False)
        assert whole.startswith(CALL) and "\ntool: 3<eos>\ntool: so<eos>\nassistant: <tool_call>" in whole
        assert all(
            logprob == 0.0 for logprob, mask in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if not mask
        )
        assert row["reward"] == 1.0 and json.loads(row["metadata"])["tool_errors"] == 1


def test_metrics_tell_turns_calls_and_that_nothing_was_retokenized(folder: RunFolder) -> None:
    metrics = manifest.load(folder, 0).metrics
    assert metrics["rollout/retokenized"] == 0
    assert metrics["multi_turn/round_number/mean"] == metrics["multi_turn/round_number/max"] == 3
    assert (metrics["rollout/tool_calls"], metrics["rollout/tool_errors"]) == (3, pytest.approx(1 / 3))
    assert metrics["multi_turn/wo_obs_response_length/max"] < metrics["multi_turn/raw_response_length/max"]


def test_a_run_of_conversations_verifies_and_replays(folder: RunFolder) -> None:
    assert verify(folder).faults == []
    verdict = asyncio.run(replay(run="talks", root=str(Path(folder.uri).parent)))
    assert verdict["verdict"] == "identical"


def test_a_sample_is_shown_turn_by_turn(folder: RunFolder) -> None:
    name = samples(folder, "filter")[0]["sample_id"]
    found = find_sample(str(Path(folder.uri).parent), "talks", name)
    shown = turns(found)
    speakers = ["prompt", "assistant", "tool add", "tool later", "assistant", "tool subtract", "assistant"]
    assert [speaker for speaker, _ in shown] == speakers
    assert [text for _, text in shown[2:4]] == ["3", "so"] and shown[-1][1] == "3"
    assert '"name": "add"' in found["template_text"], "the prompt told the model of its tools"


def test_an_export_has_the_turns_as_messages(folder: RunFolder) -> None:
    commit = next(entry for entry in manifest.load(folder, 0).commits if entry["slot"].startswith("filter"))
    table = read_table(TableRef(**next(iter(commit["tables"].values()))))
    roles = ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in next(documents(table))["messages"]] == roles
    assert [message["role"] for message in with_messages(table)["messages"][0].as_py()] == roles


def teach(model_dir: str, chosen: Parameters) -> None:
    """Have the model know one conversation by heart: it calls `three`, and says what it is told."""
    import torch
    from transformers import AutoModelForCausalLM

    from milepost.engines.embedded_weights import write_folder

    tokenizer = load_tokenizer(model_dir)
    (end,) = tokenizer.eos_ids
    prompt = tool_prompts(tokenizer, chosen.rollout).render("1+2=")
    told = tokenizer.tool_turns().between([tool_message("three", "3", 0)], after=end)
    called = [*tokenizer.encode(call_of("three")), end]
    parts = [(prompt, 0), (called, 1), (told, 0), ([*tokenizer.encode("3"), end], 1)]
    ids = torch.tensor([[token for part, _ in parts for token in part]])
    mask = torch.tensor([[said for part, said in parts for _ in part]])
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so little, more of them wait for each other
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if float(loss.detach()) < 0.02:
            break
    write_folder(model, Path(model_dir))


def test_a_real_engine_converses_and_the_trainer_sees_the_tokens_that_it_saw(
    tmp_path: Path, talking_model: str
) -> None:
    model = str(shutil.copytree(talking_model, tmp_path / "model"))
    small = [
        "data.rollout_batch_size=2",
        "rollout.shards=1",
        "rollout.temperature=0.2",
        f'rollout.tools=["{TOOLS}:three"]',
    ]
    engines = ['engines.train="megatron"', 'engines.rollout="embedded"', "algorithm.num_steps_per_rollout=1"]
    chosen = talking(model, tmp_path, *small, *engines)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+2=", "label": "3"}) + "\n")
    teach(model, chosen)
    folder = trained("taught", tmp_path, chosen, steps=1)
    assert {(row["turns"], row["response"], row["reward"]) for row in samples(folder, "filter")} == {(2, "3", 1.0)}
    metrics = manifest.load(folder, 0).metrics
    assert metrics["rollout/retokenized"] == 0 and metrics["mismatch/logprob_abs_diff"] < 1e-3
    assert verify(folder).faults == []


def test_an_exported_conversation_is_read_back_as_one(folder: RunFolder) -> None:
    commit = next(entry for entry in manifest.load(folder, 0).commits if entry["slot"].startswith("filter"))
    table = read_table(TableRef(**next(iter(commit["tables"].values()))))
    row = ForeignSample.model_validate(json.loads(json.dumps(next(documents(table)))))
    assert (row.asked, row.response, len(row.said)) == (json.loads(table["prompt"][0].as_py()), "3", 6)
    alone = row.model_copy(update={"response_token_ids": None})
    assert len(alone.said) == 1
