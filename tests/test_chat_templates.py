"""What is trained of dialogues under templates that follow the rules of known ones, to the token."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from milepost.engines.tokenizer import Tokenizer, write_character_tokenizer
from milepost.storage.sft_rows import Dialogue, read_sft_rows

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:+=?\"{}_-[]'"
MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
MARKS += ["<|bos|>", "<|header|>", "<|end_header|>", "<|eot|>"]

# As that of Qwen3: thoughts are kept only after the last question, and the last answer has an empty one if it has none.
QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set thought, said = '', m.content or '' %}
    {%- if '</think>' in said %}{% set thought, said = said.split('</think>') %}{% endif %}
    {%- set thought = thought.replace('<think>', '').strip() %}
    {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- said.strip() }}
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As that of Llama 3.1: what is said is trimmed, and calls of tools take its place.
LLAMA3 = """
{{- '<|bos|>' }}
{%- if tools %}{{ '<|header|>system<|end_header|>\\n\\n' + tools[0].function.name + '<|eot|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|header|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header|>\\n\\n' }}
    {{- '{\"name\": \"' + m.tool_calls[0].function.name + '\"}' if m.tool_calls else m.content | trim }}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}"""

SILENT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}"
SILENT += "{% if add_generation_prompt %}assistant: {% endif %}"

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": " 2\n"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "<think>twice</think>4"},
]
ASKED = [
    {"role": "user", "content": "1+1"},
    CALL,
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]


def tokenizer(folder: Path, template: str, end: str) -> Tokenizer:
    """A token a character, and one for each mark."""
    write_character_tokenizer(str(folder), CHARACTERS)
    backend = PreTrainedTokenizerFast.from_pretrained(folder, eos_token=end, additional_special_tokens=MARKS)
    backend.chat_template = template
    return Tokenizer(backend, frozenset([backend.eos_token_id]))


@pytest.fixture
def qwen3(tmp_path: Path) -> Tokenizer:
    return tokenizer(tmp_path, QWEN3, "<|im_end|>")


@pytest.fixture
def llama3(tmp_path: Path) -> Tokenizer:
    return tokenizer(tmp_path, LLAMA3, "<|eot|>")


def shown(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[str]:
    """Each text that is learnt, with what is trained of it between angle quotes."""
    found = []
    for one in tokenizer.dialogues(messages, tools):
        text, before = "", 0
        for token, trained in zip(one.ids, one.mask, strict=True):
            text += {(0, 1): "«", (1, 0): "»"}.get((before, trained), "")
            text, before = text + tokenizer.decode([token], skip_special_tokens=False), trained
        found.append(text + "»" * before)
    return found


SYSTEM = "<|im_start|>system\nbe brief<|im_end|>\n"
ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_thoughts_teaches_each_answer_as_it_is_asked_for(qwen3: Tokenizer) -> None:
    assert shown(qwen3, TALK) == [
        SYSTEM + ASK.format("1+1") + "«<think>\n\n</think>\n\n2<|im_end|>»\n",
        SYSTEM
        + ASK.format("1+1")
        + "2<|im_end|>\n"
        + ASK.format("2+2")
        + "«<think>\ntwice\n</think>\n\n4<|im_end|>»\n",
    ]
    assert [one.asked for one in qwen3.dialogues(TALK)] == [TALK[:2], TALK[:4]]


def test_what_is_asked_is_what_an_engine_would_be_given(qwen3: Tokenizer) -> None:
    for one in qwen3.dialogues(TALK):
        assert one.ids[: one.mask.index(1)] == qwen3.render(one.asked)


def test_calls_of_tools_are_learnt_and_their_results_are_not(qwen3: Tokenizer, llama3: Tokenizer) -> None:
    offered = f"<|im_start|>system\n{str(TOOLS[0]).replace(chr(39), chr(34))}<|im_end|>\n"
    think, call = "<think>\n\n</think>\n\n", "<tool_call>add</tool_call><|im_end|>"
    assert shown(qwen3, ASKED, TOOLS) == [
        offered + ASK.format("1+1") + f"«{think}{call}»\n",
        offered + ASK.format("1+1") + f"{call}\n" + ASK.format("2") + f"«{think}two<|im_end|>»\n",
    ]
    assert shown(llama3, ASKED, TOOLS) == [
        "<|bos|><|header|>system<|end_header|>\n\nadd<|eot|><|header|>user<|end_header|>\n\n1+1<|eot|>"
        '<|header|>assistant<|end_header|>\n\n«{"name": "add"}<|eot|>»<|header|>ipython<|end_header|>\n\n2<|eot|>'
        "<|header|>assistant<|end_header|>\n\n«two<|eot|>»"
    ]


def test_tools_of_a_row_are_shown_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": ASKED, "tools": TOOLS}) + "\n" + json.dumps({"messages": TALK}) + "\n")
    asked, talk = read_sft_rows(str(path))
    assert isinstance(asked, Dialogue) and isinstance(talk, Dialogue)
    assert (asked.tools, talk.tools) == (TOOLS, [])
    path.write_text(json.dumps({"messages": ASKED, "tools": "add"}) + "\n")
    with pytest.raises(ValueError, match="rows.jsonl line 1: 'tools' is text that is not a JSON list"):
        read_sft_rows(str(path))


def test_a_template_that_keeps_its_beginnings_teaches_a_dialogue_as_one_text(llama3: Tokenizer) -> None:
    assert shown(llama3, TALK[:4]) == [
        "<|bos|><|header|>system<|end_header|>\n\nbe brief<|eot|><|header|>user<|end_header|>\n\n1+1<|eot|>"
        "<|header|>assistant<|end_header|>\n\n«2<|eot|>»<|header|>user<|end_header|>\n\n2+2<|eot|>"
    ]


def test_calls_and_tools_that_a_template_does_not_show_are_refused(tmp_path: Path) -> None:
    silent = tokenizer(tmp_path, SILENT, "<|eot|>")
    with pytest.raises(ValueError, match="does not show the tool calls of message 1: take them out"):
        silent.dialogues(ASKED)
    with pytest.raises(ValueError, match="does not show tools to the model: take them out"):
        silent.dialogues(TALK, TOOLS)
