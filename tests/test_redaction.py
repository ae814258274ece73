"""Secrets: what is stored and shown has masks, what a run works with has values."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage import attempts, redaction, runs
from milepost.storage.parameters import EnginesSection, Parameters, RewardSection, TrackingSection
from milepost.storage.redaction import is_secret_name, literals, masked, masked_text, resolved, scrubbed

SECRET_NAMES = [
    "api_key",
    "apiKey",
    "API-KEY",
    "hf_token",
    "HfToken",
    "password",
    "client-secret",
    "awsSecretAccessKey",
]
SECRET_NAMES += ["credential", "ssl_keyfile_password", "reward_api_key", "x_credentials", "key", "token", "id_token"]
PLAIN_NAMES = [
    "max_tokens",
    "tokenizer",
    "tokens",
    "max_tokens_per_micro_batch",
    "input_key",
    "label_key",
    "tools_key",
    "monkey",
]
PLAIN_NAMES += ["eos_token", "eos_token_id", "speculative_token_map", "keyframes", "secretary", "answer_key", ""]

# A secret that no mask, name or number can hold by chance.
secrets = st.text("bcdfghjkBCDFGHJK0123456789-_.~", min_size=8, max_size=24).map(lambda text: f"Zq{text}")
plain = st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=8), st.floats(allow_nan=False))


@st.composite
def holding(draw: st.DrawFn, secret: str) -> tuple[str, Any]:
    """A name and a value that carries the secret, in one of the ways that are known."""
    url = draw(st.sampled_from(["https", "s3", "postgresql+psycopg"])) + "://"
    user, name = draw(st.sampled_from(["", "user", "a%40b"])), draw(st.sampled_from(SECRET_NAMES))
    login = f"{url}{user}:{quote(secret)}@host:80/path.jsonl@[0:9]"
    query = f"{url}host/p?{urlencode({'a': '1', name: secret, 'b': '2'})}#end"
    form = draw(st.sampled_from(["named", "nested", "login", "query", "command"]))
    plainly = draw(st.sampled_from(["path", "uri", "options"]))
    if form == "named":
        return name, secret
    if form == "nested":
        return name, {"a": [{"b": secret}], "c": 1}
    return plainly, {"login": login, "query": query, "command": f"run --to '{login}' -x {query} --now"}[form]


@st.composite
def contents(draw: st.DrawFn) -> tuple[str, Any]:
    """A secret and nested parameters that have it somewhere."""
    secret = draw(secrets)
    content: Any = dict([draw(holding(secret))])
    for _ in range(draw(st.integers(0, 3))):
        beside = draw(st.dictionaries(st.text(max_size=6), plain, max_size=3))
        content = {**beside, "section": content} if draw(st.booleans()) else {"items": [content, beside]}
    return secret, content


@given(contents())
def test_no_secret_is_in_what_is_stored_of_nested_parameters(found: tuple[str, Any]) -> None:
    secret, content = found
    stored = masked(content)
    assert secret not in json.dumps(stored)
    assert masked(stored) == stored
    assert literals(content)


@given(st.dictionaries(st.sampled_from([name for name in PLAIN_NAMES if name]), plain))
def test_what_is_no_secret_is_stored_as_it_is(content: dict[str, Any]) -> None:
    stored = masked(content)
    assert stored == content or any("://" in str(value) or "=" in str(value) for value in content.values())


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_secret_is_known_by_a_whole_word_of_its_name(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_other_words_name_no_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_urls_keep_all_but_what_they_log_in_with() -> None:
    text = "get https://user:pa'ss@host/p?token=abc&a=1#x and s3://bucket/p.jsonl@[0:3]"
    assert masked_text(text) == "get https://***@host/p?token=***&a=1#x and s3://bucket/p.jsonl@[0:3]"
    assert masked_text("memory://p.jsonl@[1:]") == "memory://p.jsonl@[1:]"


def test_a_reference_is_stored_as_it_is_and_resolved_for_use(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Parameters(reward=RewardSection(options={"api_key": "env:GRADER_KEY", "n": 2}))
    assert given.model_dump(mode="json")["reward"]["options"] == {"api_key": "env:GRADER_KEY", "n": 2}
    with pytest.raises(LookupError, match=r"reward.options.api_key is 'env:GRADER_KEY', and there is no environment"):
        given.resolved()
    monkeypatch.setenv("GRADER_KEY", "hidden")
    assert given.resolved().reward.options == {"api_key": "hidden", "n": 2}
    assert given.resolved().model_dump(mode="json")["reward"]["options"]["api_key"] == "***"


def test_a_masked_field_is_named_when_it_is_needed() -> None:
    secret = Parameters(tracking=TrackingSection(mlflow_uri="https://me:hidden@mlflow.example"))
    stored = Parameters.model_validate(secret.model_dump(mode="json"))
    with pytest.raises(ValueError, match="tracking.mlflow_uri is a secret and stored as 'https://.*give it again"):
        stored.resolved()
    read = Parameters.model_validate({"data": {"path": "https://***@host/p.jsonl"}, "rollout": {"stop": ["***"]}})
    assert read.resolved(going_on=True) == read


def test_another_secret_is_no_other_configuration() -> None:
    one, two, three = (
        Parameters(reward=RewardSection(options={"api_key": value, "a": 1})) for value in ("one", "two", "env:THREE")
    )
    assert runs.parameters_digest(one) == runs.parameters_digest(two)
    assert attempts.changes(one, two) == attempts.changes(one, three) == {}
    other = Parameters(reward=RewardSection(options={"api_key": "two", "a": 2}))
    found = attempts.changes(one, other)
    assert found == {"reward.options": [{"api_key": "***", "a": 1}, {"api_key": "***", "a": 2}]}


def test_json_of_a_section_has_masks_whatever_is_left_out() -> None:
    engines = EnginesSection(sglang={"ssl_keyfile_password": "hidden"}, sglang_urls=["http://a:hidden@host:1"])
    assert "hidden" not in engines.model_dump_json() + json.dumps(engines.model_dump(mode="json", exclude={"pool"}))
    assert engines.model_dump()["sglang"] == {"ssl_keyfile_password": "hidden"}


def test_an_error_that_repeats_a_secret_is_scrubbed() -> None:
    text = scrubbed("401 for https://h/?api_key=Hid/den1 (Hid/den1)", {"api_key": "Hid/den1", "n": 1})
    assert text == "401 for https://h/?api_key=*** (***)"


def test_a_root_with_credentials_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"root 's3://\*\*\*@bucket/runs' holds credentials.*environment") as caught:
        runs.run_folder("s3://me:hidden@bucket/runs", "first")
    assert "hidden" not in str(caught.value)


def test_values_that_stand_for_nothing_are_left_alone() -> None:
    content = {"api_key": "", "use_token": True, "token": None, "list": ["env:NOT A NAME"]}
    assert masked(content) == content == resolved(content)
    assert redaction.without_references({"a": "env:X", "key": "env:X"}) == {"a": "env:X", "key": "***"}
