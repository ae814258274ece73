"""Prompt sets from files as people write them, with every fault a line can have."""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage import files
from milepost.storage.parameters import DataSection
from milepost.storage.prompt_rows import prompt_id
from milepost.storage.prompt_source import parse_path
from milepost.storage.prompts import PromptSet, load_prompts
from milepost.storage.schema import PROMPTS, check

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


class Characters:
    """One token a character; a template that marks each message."""

    def render(self, messages: list[dict[str, Any]] | str, tools: list[dict[str, Any]] | None = None) -> list[int]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if messages[0]["role"] == "nobody":
            raise ValueError("the role 'nobody' is not known")
        shown = [{"content": json.dumps(tools)}] if tools else []
        return [token for message in [*shown, *messages] for token in [0, *self.encode(message["content"] or "")]]

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text.encode().decode()]


def load(path: Path | str, *, context_length: int = 100, quarantine_uri: str | None = None, **data: Any) -> PromptSet:
    section = DataSection(path=str(path), **data)
    return load_prompts(section, Characters(), context_length=context_length, quarantine_uri=quarantine_uri)


def load_sets(*sets: dict[str, Any], **data: Any) -> PromptSet:
    return load_prompts(DataSection(sets=list(sets), **data), Characters(), context_length=100)


def write(folder: Path, *lines: str | bytes, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def numbered(folder: Path, count: int) -> Path:
    return write(folder, *(json.dumps({"prompt": f"p{number}"}) for number in range(count)))


def test_a_row_becomes_a_prompt_with_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "ab", "label": 3, "metadata": {"k": [1]}}')
    prompt = load(path).prompts[0]
    assert (prompt.prompt, prompt.label, prompt.metadata) == ('"ab"', "3", '{"k": [1]}')
    assert (prompt.prompt_token_ids, prompt.dataset, prompt.row) == ([0, 97, 98], "set", 0)


def test_a_string_is_encoded_as_it_is_without_the_template(tmp_path: Path) -> None:
    assert load(numbered(tmp_path, 1), apply_chat_template=False).prompts[0].prompt_token_ids == [112, 48]


def test_messages_are_rendered_through_the_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path, json.dumps({"prompt": messages}))
    assert load(path).prompts[0].prompt_token_ids == [0, 115, 0, 117]
    with pytest.raises(ValueError, match=r"line 1 \(row 0\): the prompt is a list of messages: set data"):
        load(path, apply_chat_template=False)


@given(st.integers(-12, 12) | st.none(), st.integers(-12, 12) | st.none())
def test_a_slice_means_what_it_means_in_python(
    tmp_path_factory: pytest.TempPathFactory, start: int | None, stop: int | None
) -> None:
    path = numbered(tmp_path_factory.mktemp("set"), 7)
    text = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = list(range(7))[start:stop]
    if expected:
        assert [prompt.row for prompt in load(text).prompts] == expected
    else:
        with pytest.raises(ValueError, match="selects none of the 7 rows"):
            load(text)


@pytest.mark.parametrize(
    "text", ["a.jsonl@[1]", "a.jsonl@[1:2", "a.jsonl@[1:2:3]", "a.jsonl@[a:b]", "@[1:2]", "a.jsonl]"]
)
def test_a_slice_that_cannot_be_read_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"has no slice of the form '@\[start:stop\]'"):
        parse_path(text)


def test_jsonl_gzip_and_parquet_of_the_same_rows_are_the_same_set(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"p{n}"}], "label": "x", "metadata": {"n": n}} for n in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    sets = [load(tmp_path / name) for name in ("a.jsonl", "a.jsonl.gz", "a.parquet")]
    assert sets[0] == sets[1] == sets[2]


def test_any_fsspec_path_will_do() -> None:
    files.publish("memory://prompts/here.jsonl", b'{"prompt": "a"}\n', overwrite=True)
    assert load("memory://prompts/here.jsonl@[:1]").prompts[0].dataset == "here"


def test_metadata_in_parquet_may_be_json_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "metadata": ['{"deep": {"k": null}}']}), path)
    assert json.loads(load(path).prompts[0].metadata) == {"deep": {"k": None}}


def test_a_message_field_that_only_others_have_is_left_out_of_a_parquet_message(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a", "name": "n"}]}, {"prompt": [{"role": "user", "content": "b"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    prompts = load(tmp_path / "a.parquet").prompts
    assert [sorted(json.loads(prompt.prompt)[0]) for prompt in prompts] == [
        ["content", "name", "role"],
        ["content", "role"],
    ]


@given(JSON, JSON, st.dictionaries(st.text(), JSON), st.randoms())
def test_identity_is_content_and_not_the_order_of_keys(
    prompt: Any, label: Any, metadata: dict[str, Any], random: Any
) -> None:
    shuffled = list(metadata.items())
    random.shuffle(shuffled)
    assert prompt_id(prompt, label, metadata) == prompt_id(prompt, label, dict(shuffled))
    assert prompt_id(prompt, label, metadata) != prompt_id([prompt], label, metadata)


def test_identity_survives_a_slice_and_another_file(tmp_path: Path) -> None:
    whole, part = load(numbered(tmp_path, 4)), load(f"{numbered(tmp_path, 4)}@[2:]")
    assert [prompt.prompt_id for prompt in part.prompts] == [prompt.prompt_id for prompt in whole.prompts[2:]]
    assert whole.digest != part.digest


def test_duplicates_are_served_and_counted(tmp_path: Path) -> None:
    found = load(write(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}', '{"prompt": "a"}', '{"prompt": "a"}'))
    assert (len(found), found.duplicates) == (4, 2)


def test_a_line_ends_at_a_newline_and_at_nothing_else(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0ce"
    found = load(write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False), '{"prompt": "z"}\r'))
    assert [json.loads(prompt.prompt) for prompt in found.prompts] == [text, "z"]


def test_a_byte_order_mark_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}', "", '{"prompt": "b"}', "", "  ")
    assert [prompt.row for prompt in load(path).prompts] == [0, 1]


def test_a_lone_surrogate_is_kept_and_the_tokenizer_never_sees_it(tmp_path: Path) -> None:
    prompt = load(write(tmp_path, r'{"prompt": "a\ud800b", "label": "\udfff"}')).prompts[0]
    assert (json.loads(prompt.prompt), json.loads(prompt.label)) == ("a\ud800b", "\udfff")
    assert prompt.prompt_token_ids == [0, *map(ord, "a\ufffdb")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x"', "not JSON: Expecting ',' delimiter at column"),
        ('{"prompt": NaN}', "NaN is not JSON"),
        ('{"prompt": "x", "label": -Infinity}', "-Infinity is not JSON"),
        ('{"prompt": "x", "label": 1e999}', "the number 1e999 is too large"),
        ('{"prompt": "x", "prompt": "y"}', "the key 'prompt' is given twice"),
        ('{"prompt": "x", "metadata": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        ("[1]", "a list, not a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        ("[" * 100_000, "nested too deeply"),
        ('{"question": "x"}', r"no 'prompt'; keys found: \['question'\]"),
        ('{"prompt": ""}', "expected a string or a list of messages, not empty"),
        ('{"prompt": []}', "expected a string or a list of messages, not empty"),
        ('{"prompt": 7}', "'prompt' is 7, expected a string"),
        ('{"prompt": [{"role": "user"}]}', "expected a message with 'role' and 'content'"),
        ('{"prompt": [{"role": "nobody", "content": "x"}]}', "the tokenizer refuses it: the role 'nobody'"),
        ('{"prompt": "x", "metadata": [1]}', r"'metadata' is \[1\], expected an object"),
        ('{"prompt": "x", "metadata": "{"}', "'metadata' is text that is not a JSON object"),
    ],
)
def test_a_bad_line_stops_with_file_line_and_reason_or_is_moved(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = write(tmp_path, '{"prompt": "a"}', "", line, '{"prompt": "b"}')
    with pytest.raises(ValueError, match=rf"set\.jsonl line 3 \(row 1\): .*{reason}"):
        load(path)
    found = load(path, on_bad_line="quarantine", quarantine_uri=str(tmp_path / "bad.jsonl"))
    assert ([prompt.row for prompt in found.prompts], found.bad_lines) == ([0, 2], 1)
    assert json.loads((tmp_path / "bad.jsonl").read_text())["line"] == 3


def test_the_quarantine_holds_what_the_line_held(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"prompt": "\xff"}', '{"prompt": "a"}')
    load(path, on_bad_line="quarantine", quarantine_uri=str(tmp_path / "bad.jsonl"))
    moved = json.loads((tmp_path / "bad.jsonl").read_text())
    place = {"file": str(path), "line": 1, "row": 0}
    assert moved == place | {"reason": "not UTF-8 at byte 12", "text": '{"prompt": "\\xff"}'}


def test_a_set_of_nothing_but_bad_lines_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no usable row, and the first is line 1 .row 0.: not JSON"):
        load(write(tmp_path, "{"), on_bad_line="quarantine")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"input_key": "promt"},
            r"data.input_key 'promt', did you mean 'prompt'\?; keys found: \['prompt'\]",
        ),
        ({"label_key": "answer"}, "no row has data.label_key 'answer'"),
        ({"metadata_key": "extra"}, "no row has data.metadata_key 'extra'"),
    ],
)
def test_a_key_that_no_row_has_is_an_error_with_the_keys_found(
    tmp_path: Path, keys: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(numbered(tmp_path, 2), **keys)


def test_a_prompt_that_leaves_no_room_is_set_aside_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": "x" * length}) for length in (1, 2, 3, 4)))
    found = load(path, context_length=4, apply_chat_template=False)
    assert ([prompt.row for prompt in found.prompts], found.too_long, found.too_long_share) == ([0, 1, 2], 1, 0.25)
    with pytest.raises(ValueError, match="all 4 prompts are too long, the shortest has 1 tokens and the context 1"):
        load(path, context_length=1, apply_chat_template=False)


def test_a_file_that_is_not_there_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    numbered(tmp_path, 1)
    with pytest.raises(ValueError, match=r"sett\.jsonl' does not exist, did you mean 'set\.jsonl'"):
        load(tmp_path / "sett.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b"\n\n", "holds no rows"),
        ("a.jsonl.gz", b"no gzip", "is not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9], "is not a whole gzip file"),
        ("a.parquet", b"no parquet", "is not a sound Parquet file"),
        ("a.csv", b"prompt", r"must end in one of \.jsonl, \.jsonl\.gz, \.parquet"),
    ],
)
def test_a_file_that_is_no_prompt_set_says_so(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name)


def test_no_path_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path is empty"):
        load("")
    (tmp_path / "a.parquet").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        load(tmp_path / "a.parquet")


def test_a_parquet_value_that_json_cannot_hold_is_a_bad_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "label": [1.0, float("nan")]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"line 2 \(row 1\): a value that JSON cannot hold"):
        load(tmp_path / "a.parquet")


def test_the_table_of_a_set_has_the_schema_of_prompts(tmp_path: Path) -> None:
    table = load(numbered(tmp_path, 3)).table
    assert check(table, PROMPTS).num_rows == 3 and table["row"].to_pylist() == [0, 1, 2]


def test_a_map_with_a_key_twice_is_a_bad_row_and_its_neighbours_are_not(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1)], [("a", 1), ("a", 2)], [("b", 1)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"prompt": ["x", "y", "z"], "metadata": maps}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"line 2 \(row 1\): .*duplicate key was 'a'"):
        load(tmp_path / "a.parquet")
    assert [prompt.row for prompt in load(tmp_path / "a.parquet", on_bad_line="quarantine").prompts] == [0, 2]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="two columns called 'prompt': rename one"):
        load(tmp_path / "a.parquet")


def test_rows_beyond_a_batch_are_the_rows_of_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}"} for number in range(5000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = load(f"{tmp_path / 'a.parquet'}@[1000:-10]")
    assert found.table["row"].to_pylist() == list(range(1000, 4990))
    assert found.digest == load(f"{numbered(tmp_path, 5000)}@[1000:-10]").digest


def test_a_folder_that_datasets_has_saved_is_a_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([{"prompt": f"p{number}", "label": number} for number in range(9)])
    datasets.DatasetDict({"train": saved.select(range(3, 9))}).save_to_disk(str(tmp_path / "both"))
    found = load(f"{tmp_path}/both/train@[1:3]").prompts
    assert [(prompt.row, prompt.label, prompt.dataset) for prompt in found] == [(1, "4", "train"), (2, "5", "train")]
    with pytest.raises(ValueError, match=r"holds the splits \['train'\]: give one, such as .*both/train"):
        load(tmp_path / "both")


def test_a_saved_folder_without_the_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"`datasets`, which is not installed: pip install 'milepost\[datasets\]'"):
        load(tmp_path)


def test_a_system_prompt_comes_before_prompts_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "t"}, {"role": "user", "content": "u"}]
    path = write(tmp_path, '{"prompt": "a"}', json.dumps({"prompt": own}))
    found = [json.loads(prompt.prompt) for prompt in load(path, system_prompt="s").prompts]
    assert found == [[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], own]
    with pytest.raises(ValueError, match="data.system_prompt needs data.apply_chat_template"):
        load(path, system_prompt="s", apply_chat_template=False)


def test_tools_are_shown_by_the_template_and_kept_in_the_metadata(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = write(
        tmp_path, json.dumps({"prompt": "a", "tools": tools}), json.dumps({"prompt": "a", "tools": json.dumps(tools)})
    )
    first, second = load(path, context_length=200).prompts
    assert json.loads(first.metadata) == {"tools": tools} and first.prompt_id == second.prompt_id
    assert first.prompt_token_ids == [0, *map(ord, json.dumps(tools)), 0, 97]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tools": "add"}, "'tools' is text that is not a JSON list"),
        ({"tools": ["add"]}, "expected a list of tool definitions"),
        ({"tools": [{}], "metadata": {"tools": [{}]}}, "tools in 'tools' and in 'metadata': give them once"),
        ({"prompt": [{"role": "user", "content": 7}]}, "expected a message with 'role' and 'content'"),
        ({"prompt": [{"role": "assistant", "tool_calls": []}]}, "expected a message with 'role' and 'content'"),
    ],
)
def test_tools_and_messages_that_are_none_are_bad_lines(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(write(tmp_path, json.dumps({"prompt": "a"} | row)))


def test_a_message_that_calls_tools_may_say_nothing(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert json.loads(load(write(tmp_path, json.dumps({"prompt": [called]}))).prompts[0].prompt) == [called]


def test_a_prompt_over_its_own_limit_is_set_aside_by_rendered_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": "x" * length}) for length in (1, 2, 3)))
    found = load(path, max_prompt_tokens=3)
    assert ([prompt.row for prompt in found.prompts], found.too_long) == ([0, 1], 1)
    with pytest.raises(
        ValueError, match="the shortest has 2 tokens and the limit is 1: raise data.max_prompt_tokens to 2"
    ):
        load(path, max_prompt_tokens=1)


def test_several_sets_lie_behind_each_other_under_their_names(tmp_path: Path) -> None:
    sums = write(tmp_path, '{"prompt": "1+1", "label": 2}', '{"prompt": "2+2", "label": 4}', name="sums.jsonl")
    quiz = write(tmp_path, '{"question": "Who?", "answer": "A", "metadata": {"reward": "f1"}}', name="quiz.jsonl")
    found = load_sets(
        {"path": str(sums), "reward": "math", "weight": 3},
        {"path": f"{quiz}@[:1]", "name": "q", "input_key": "question", "label_key": "answer", "reward": "exact"},
    )
    assert [(prompt.dataset, prompt.row) for prompt in found.prompts] == [("sums", 0), ("sums", 1), ("q", 0)]
    assert [json.loads(prompt.metadata) for prompt in found.prompts] == [
        {"reward": "math"},
        {"reward": "math"},
        {"reward": "f1"},
    ]
    assert [(share.name, share.rows, share.weight) for share in found.shares] == [("sums", 2, 3.0), ("q", 1, 1.0)]


def test_what_a_set_sets_aside_is_counted_under_its_name(tmp_path: Path) -> None:
    first = write(tmp_path, '{"prompt": "a"}', json.dumps({"prompt": "x" * 200}), name="a.jsonl")
    second = write(tmp_path, "{", '{"prompt": "b"}', name="b.jsonl")
    found = load_sets({"path": str(first)}, {"path": str(second)}, on_bad_line="quarantine")
    assert [(share.too_long, share.bad_lines) for share in found.shares] == [(1, 0), (0, 1)]
    assert (found.too_long, found.bad_lines) == (1, 1)


def test_sets_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    path = str(numbered(tmp_path, 2))
    with pytest.raises(ValueError, match="are both called 'set': give one another name, as its 'name' in data.sets"):
        load_sets({"path": path}, {"path": path})
    with pytest.raises(ValueError, match="data.path is .* and data.sets has prompt sets, too"):
        load_sets({"path": path}, path=path)


def labels_are_digits(asked: Sequence[tuple[Any, dict[str, Any]]]) -> list[str]:
    return ["" if str(label).isdigit() else f"label {label!r} is no number" for label, _ in asked]


def test_a_label_that_cannot_be_graded_stops_with_its_row_or_is_moved(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a", "label": "1"}', "", '{"prompt": "b", "label": "x"}')
    section = DataSection(path=str(path))
    with pytest.raises(ValueError, match=r"set.jsonl line 3 \(row 1\): label 'x' is no number"):
        load_prompts(section, Characters(), context_length=9, check_labels=labels_are_digits)
    chosen = section.model_copy(update={"on_bad_line": "quarantine"})
    found = load_prompts(chosen, Characters(), context_length=9, check_labels=labels_are_digits)
    assert ([prompt.row for prompt in found.prompts], found.bad_lines) == ([0], 1)
