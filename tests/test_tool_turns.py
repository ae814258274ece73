"""What a chat template puts between two answers, and templates for which that cannot be told."""

from pathlib import Path

import pytest

from milepost.engines.tokenizer import Tokenizer
from milepost.engines.tool_turns import tool_message
from milepost.storage.parameters import RolloutSection
from milepost.tasks.tool_prompts import tool_prompts

from .talking import HERMES, TOOLS, tokenizer_with

# An answer that is last shows a thought, an earlier one only where it has one: as Qwen 3 has it.
THINKS = HERMES.replace(
    "{{- message.role }}: ",
    "{{- message.role }}: {% if message.role == 'assistant' and (loop.last or message.reasoning_content) %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}",
)
# One call an answer, as Llama 3.1 has it.
SINGLE = HERMES.replace(
    "{%- for call in",
    "{%- if (message.tool_calls or [])|length > 1 %}{{ raise_exception('one call') }}{% endif %}{% for call in",
)
# Without a word where an answer begins, and with ids of nine letters, as Mistral has it.
BARE = HERMES.replace("{%- if add_generation_prompt %}assistant: {% endif %}", "")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tokenizer_with(HERMES, tmp_path)


def test_what_is_between_two_answers_is_what_the_template_puts_there(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_ids
    turns, result = tokenizer.tool_turns(), tool_message("add", "3", 0)
    said = tokenizer.decode(turns.between([result], after=end), skip_special_tokens=False)
    assert said == "\ntool: 3<eos>\nassistant: "
    assert turns.between([result], after=5) == [end, *turns.between([result], after=end)]


def test_several_results_are_told_at_once(tokenizer: Tokenizer) -> None:
    results = [tool_message("add", text, at) for at, text in enumerate(["3", "5"])]
    said = tokenizer.decode(tokenizer.tool_turns().between(results, after=-1), skip_special_tokens=False)
    assert said == "<eos>\ntool: 3<eos>\ntool: 5<eos>\nassistant: "


def test_a_conversation_by_increments_is_the_one_that_the_template_renders(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_ids
    asked, answer = [{"role": "user", "content": "1+2="}], {"role": "assistant", "content": "let me see"}
    result = tool_message("add", "3", 0)
    ids = [*tokenizer.render(asked), *tokenizer.encode("let me see"), end]
    assert [*ids, *tokenizer.tool_turns().between([result], after=end)] == tokenizer.render([*asked, answer, result])


@pytest.mark.parametrize("template", [HERMES, THINKS, SINGLE, BARE])
def test_templates_of_the_known_kinds_pass(tmp_path: Path, template: str) -> None:
    tokenizer_with(template, tmp_path).tool_turns().check()


REFUSED = [
    (HERMES.replace("message.content }}", "message.content if message.role != 'tool' }}"), "does not show messages"),
    (HERMES.replace("{{- eos_token }}\n{% endfor %}", "\n{% endfor %}"), "with none of the end tokens"),
    (
        HERMES.replace("message.role }}: ", "message.role }}{{ messages|length }}: "),
        "otherwise when results of tools follow",
    ),
    (HERMES.replace("message.role }}: ", "message.role }}{{ loop.index }}: "), "otherwise in a later turn"),
    ("{{ raise_exception('no') }}", "refuses results of tools: no"),
    ("", "has no chat template"),
]


@pytest.mark.parametrize(("template", "reason"), REFUSED)
def test_a_template_for_which_it_cannot_be_told_is_refused(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tokenizer_with(template, tmp_path).tool_turns().check()


def test_prompts_show_the_tools_of_the_run_or_their_own(tokenizer: Tokenizer) -> None:
    rendered = tool_prompts(tokenizer, RolloutSection(tools=[f"{TOOLS}:add", f"{TOOLS}:later"]))
    own = [{"type": "function", "function": {"name": "later", "parameters": {}}}]
    assert '"name": "add"' in tokenizer.decode(rendered.render("1+2="))
    assert '"name": "add"' not in tokenizer.decode(rendered.render("1+2=", own))
    own[0]["function"] = {"name": "multiply"}
    with pytest.raises(
        ValueError, match=r"no function of rollout.tools is called 'multiply'; they are \['add', 'later'\]"
    ):
        rendered.render("1+2=", own)


def test_a_template_without_a_place_for_tools_gets_them_in_the_system_message_when_told(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(HERMES.replace("{%- if tools %}", "{%- if false %}"), tmp_path)
    with pytest.raises(ValueError, match="does not show tools to the model: set rollout.tool_format=hermes"):
        tool_prompts(tokenizer, RolloutSection(tools=[f"{TOOLS}:add"]))
    chosen = RolloutSection(tools=[f"{TOOLS}:add"], tool_format="hermes")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2="}]
    text = tokenizer.decode(tool_prompts(tokenizer, chosen).render(asked))
    assert text.startswith("system: Be brief.\n\n# Tools") and '"name": "add"' in text
