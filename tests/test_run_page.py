"""What the page of a run shows of samples: short, on one line, and never as markup."""

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from milepost.flows.run_page import EXCERPT, ends, excerpt, inert, prompt_text
from milepost.storage import manifest

from .bench.made_run import add_step, begin_run

printable = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))


@given(printable | st.text("`*_|<>[]()!#~ ab"))
@example("``` code")
@example("    <img src=x> `a` ``b``")
def test_what_a_model_wrote_is_shown_as_it_is(text: str) -> None:
    line = excerpt(text, 1000)
    blocks = [block.children or [] for block in MarkdownIt().parse(inert(line))]
    assert [(one.type, one.content) for block in blocks for one in block] == ([("code_inline", line)] if line else [])


def test_a_prompt_of_messages_is_its_last_one() -> None:
    assert prompt_text([{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}]) == "1+1="
    assert prompt_text("1+1=") == "1+1=" and prompt_text([]) == "[]"


def test_rows_of_samples_have_prompt_label_and_a_short_response(tmp_path: Path) -> None:
    made = begin_run(str(tmp_path))
    add_step(made, 0, generate={"response": "a\n\nb `c` " * 90})
    rows = ends(manifest.load(made.folder, 0))
    assert {row["kind"] for row in rows} == {"worst", "best"} and {row["label"] for row in rows} == {"`2`"}
    assert all(row["prompt"].endswith("+1=`") and len(row["response"]) < EXCERPT + 10 for row in rows)
