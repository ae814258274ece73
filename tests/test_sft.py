"""Supervised fine-tuning: which tokens are trained, which rows are refused, and that a model learns from the rest."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engines.chat_masks import rendered, token_mask
from milepost.engines.tokenizer import Tokenizer, load_tokenizer
from milepost.flows.fine_tune import Example, SftPlan, draw
from milepost.flows.launch_sft import sections_of
from milepost.flows.sft import sft
from milepost.flows.sft_plan import plan_sft
from milepost.storage import begun, files, runs
from milepost.storage.parameters import ModelSection
from milepost.storage.sft_rows import SftDataSection, read_sft_rows
from milepost.storage.tables import read_bytes
from milepost.storage.training import OptimizerSection, PerfSection

from .test_cli import milepost, refused

PLAIN = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}<eos>-{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}={% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}-{% else %}{{ m.content }}<eos>-{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else '*' }}<eos>{% endfor %}"
TALK = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "44"},
    {"role": "user", "content": "0"},
]

Talker = Callable[[str], Tokenizer]


@pytest.fixture
def talker(model_dir: str, tmp_path: Path) -> Talker:
    """The tokenizer of the tiny model with a chat template."""

    def make(template: str) -> Tokenizer:
        folder = tmp_path / "model"
        shutil.copytree(model_dir, folder)
        (folder / "chat_template.jinja").write_text(template)
        return load_tokenizer(str(folder))

    return make


def trained_text(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """What the trained tokens of a dialogue say, by turn."""
    (found,) = tokenizer.dialogues(messages)
    pairs = zip(found.ids, found.mask, strict=True)
    said = [tokenizer.decode([token], skip_special_tokens=False) if trained else " " for token, trained in pairs]
    return "".join(said).split()


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_the_assistant_says_is_trained_with_the_token_that_ends_it(talker: Talker, template: str) -> None:
    assert trained_text(talker(template), TALK) == ["2<eos>", "44<eos>"]


def test_a_template_that_renders_an_answer_otherwise_than_it_asks_for_it_is_refused(talker: Talker) -> None:
    with pytest.raises(ValueError, match="message 1 otherwise than it asks for it"):
        talker(FORGETFUL).dialogues(TALK)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_template_that_cannot_join_the_parts_of_a_content_is_refused(talker: Talker, template: str) -> None:
    parts = [{"type": "text", "text": "2"}]
    with pytest.raises(ValueError, match="cannot join the parts of message 1: give its content as text"):
        talker(template).dialogues([TALK[0], {"role": "assistant", "content": parts}])


def test_a_template_that_joins_the_parts_of_a_content_may(talker: Talker) -> None:
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "4"}]
    joined = "{% for m in messages %}{% for part in m.content %}{{ part.text or part }}{% endfor %}<eos>{% endfor %}"
    assert trained_text(talker(joined), [TALK[0], {"role": "assistant", "content": parts}]) == ["24<eos>"]


def test_without_a_template_messages_are_refused_and_prompts_with_responses_are_not(model_dir: str) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(model_dir).dialogues(TALK)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("ab", max_size=3)), min_size=1, max_size=6))
def test_spans_cover_exactly_what_the_assistant_says(turns: list[tuple[str, str]]) -> None:
    turns = [*turns, ("assistant", "b")]
    messages = [{"role": role, "content": text} for role, text in turns]

    def render(part: list[dict[str, Any]], asks: bool) -> str:
        return "".join(f"{one['role'][0]}:{one['content']};" for one in part) + "a:" * asks

    answers = [f"{text};" for role, text in turns if role == "assistant"]
    assert [one.text[begin:end] for one in rendered(render, messages) for begin, end in one.spans] == answers


def test_a_token_that_is_only_partly_the_assistants_is_not_trained() -> None:
    offsets = [(0, 2), (2, 4), (4, 5), (5, 6), (6, 8)]
    assert token_mask([5, 6, 1, 7, 8], offsets, [(3, 6)], {1}) == [0, 0, 1, 0, 0]
    assert token_mask([5, 6, 9, 7, 8], offsets, [(3, 6)], {1}) == [0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": TALK[:1]}, "no turn of the assistant to learn"),
        ({"messages": TALK[1:]}, "begins with the assistant"),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": ""}]},
            "message 1 is the assistant's and says nothing",
        ),
        ({"messages": [{"role": "user"}]}, "expected a message with 'role' and 'content'"),
        ({"messages": None, "prompt": "1"}, r"not both 'prompt' and 'response'; keys found: \['prompt'\]"),
        ({"prompt": "1", "response": 2}, "'response' is 2, expected text"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_refused_with_its_line(tmp_path: Path, row: object, reason: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "1+1=", "response": "2"}, row)
    with pytest.raises(ValueError, match=f"rows.jsonl line 2: .*{reason}"):
        read_sft_rows(path)


def test_an_epoch_has_every_example_once_and_a_smaller_last_batch() -> None:
    examples = [Example(str(at), [at], "", [at]) for at in range(10)]
    batches = draw(examples, SftPlan(steps=5, batch_size=4, seed=0, examples=20))
    order = [example.prompt for batch in batches for example in batch]
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4] and order[:10] != order[10:]
    assert sorted(order[:10]) == sorted(order[10:]) == sorted(example.prompt for example in examples)
    assert [len(batch) for batch in draw(examples, SftPlan(3, 4, seed=0, examples=10))] == [4, 4, 2]


def test_rows_that_are_too_long_are_counted(model_dir: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "2" * 9}]
    data = SftDataSection(path=write_rows(tmp_path / "rows.jsonl", *rows), apply_chat_template=False)
    folder, rest = runs.run_folder(str(tmp_path), "new"), {"optimizer": OptimizerSection(), "perf": PerfSection()}
    sections = sections_of(model_dir, {}, ["model.context_length=8"]) | rest | {"data": data}
    wanted = plan_sft(folder, **sections)
    assert (wanted.taught.rows, wanted.taught.too_long, wanted.plan.examples) == (2, 1, 1)
    assert wanted.examples[0].response_token_ids[-1] in load_tokenizer(model_dir).eos_ids


def test_the_command_line_refuses_a_section_that_has_no_part_in_it(model_dir: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "1", "response": "2"})
    done = milepost("sft", "--model", model_dir, "--data", path, "--set", "rollout.shards=1", cwd=tmp_path)
    refused(done, "fine-tuning has no section 'rollout', it has data, model, optimizer, perf, engines")
    assert list(tmp_path.iterdir()) == [Path(path)]


def test_what_is_there_is_not_overwritten_and_steps_exclude_epochs(model_dir: str, tmp_path: Path) -> None:
    sections, taken = sections_of(model_dir, {"path": "rows.jsonl"}, []), tmp_path / "runs" / "taken"
    taken.mkdir(parents=True)
    (taken / "mine").touch()
    with pytest.raises(FileExistsError, match="taken already exists: choose another name"):
        plan_sft(runs.run_folder(str(taken.parent), "taken"), **sections)
    with pytest.raises(ValueError, match="3 steps and 1 epochs are asked for: give one of them"):
        plan_sft(runs.run_folder(str(taken.parent), "new"), **sections, steps=3, epochs=1)


@pytest.mark.slow
def test_a_model_learns_dialogues_and_its_folder_says_what_from(
    talker: Talker, tmp_path: Path, prefect_server: str, ray_cluster: None
) -> None:
    talker(PLAIN)
    path = write_rows(tmp_path / "rows.jsonl", *({"messages": TALK[at : at + 4]} for at in (0, 2, 0, 0)))
    found = asyncio.run(
        sft(
            run="taught",
            root=str(tmp_path / "runs"),
            steps=12,
            data=SftDataSection(path=path, batch_size=4),
            model=ModelSection(path=str(tmp_path / "model"), context_length=64),
            optimizer=OptimizerSection(lr=1e-2),
            perf=PerfSection(train_threads=1),
        )
    )
    assert len(found["losses"]) == 12 and found["last_loss"] < 0.7 * found["first_loss"]
    batch = next(Path(tmp_path, "runs", "taught", "steps", "000000").glob("batch-*.parquet"))
    masks = read_bytes(batch.read_bytes())["loss_mask"].to_pylist()
    assert [1, 1] + [0] * 10 + [1, 1, 1] in masks
    assert load_tokenizer(found["model"]).has_chat_template
    origin = begun.origin(found["model"])
    assert origin.kind == "sft" and origin.record["data"]["digest"] == files.digest_of(Path(path).read_bytes())
