"""The command line as a person meets it: one sentence for a mistake, the right exit code, nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Prompts

MILEPOST = str(Path(sys.executable).parent / "milepost")
KNOBS = [
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=2",
    "algorithm.num_steps_per_rollout=1",
    "data.apply_chat_template=false",
    "reward.name=exact",
    "model.context_length=64",
    "rollout.max_new_tokens=8",
]


def milepost(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MILEPOST, *arguments], capture_output=True, text=True, cwd=cwd, timeout=300)


def settings(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One sentence on stderr with these words, exit code 2, nothing on stdout, no traceback."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("milepost: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture
def good(model_dir: str, prompts: Prompts) -> list[str]:
    return settings(*KNOBS, f"model.path={model_dir}", f"data.path={prompts()}")


def test_plan_prints_every_derived_number(good: list[str], tmp_path: Path) -> None:
    done = milepost("plan", *good, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["global_batch_size"], found["samples a step"], found["prompts"]) == (8, 8, 16)
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts.jsonl"]


def test_four_knobs_that_do_not_fit_are_refused() -> None:
    knobs = ["data.rollout_batch_size=32", "data.n_samples_per_prompt=8"]
    rest = ["algorithm.global_batch_size=200", "algorithm.num_steps_per_rollout=1"]
    refused(milepost("plan", *settings(*knobs, *rest)), "256", "200", "leave one of the four out")


def test_an_unknown_key_offers_the_nearest() -> None:
    refused(milepost("plan", "--set", "optimizer.lrr=1"), "'optimizer.lrr'", "did you mean 'lr'")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=/no/such/model", ["/no/such/model"]),
        ("data.path=/no/such/prompts.jsonl", ["/no/such/prompts.jsonl"]),
        ("reward.name=exactt", ["'exactt'", "did you mean 'exact'"]),
        ("filter.group=nozero", ["'nozero'"]),
        ("algorithm.advantage=grop", ["'grop'", "did you mean 'grpo'"]),
        ("algorithm.loss=ppo", ["'ppo'"]),
        ("algorithm.tau_positive=2", ["'ppo_clip'", "tau_positive, which is 2.0", "sapo"]),
        ("rollout.function=no_mod:fn", ["no_mod"]),
        ("model.tensor_parallel=3", ["3"]),
        ("rollout.max_new_tokens=64", ["64"]),
        ("optimizer.lr=-1", ["optimizer.lr", "-1"]),
        ("model.context_length=1000000", ["1000000"]),
    ],
)
def test_what_plan_refuses_train_refuses_with_the_same_sentence(
    good: list[str], tmp_path: Path, override: str, words: list[str]
) -> None:
    planned = milepost("plan", *good, "--set", override, cwd=tmp_path)
    refused(planned, *words)
    tried = milepost("train", *good, "--set", override, "--run", "never", cwd=tmp_path)
    assert (tried.returncode, tried.stderr) == (2, planned.stderr)
    assert not (tmp_path / "runs").exists()


def test_a_malformed_line_is_refused_with_file_and_line(good: list[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "x"\n')
    refused(milepost("plan", *good, "--set", f"data.path={path}"), "broken.jsonl", "line 2")


def test_a_malformed_line_can_be_quarantined_and_counted(good: list[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "x"\n')
    done = milepost("plan", *good, *settings(f"data.path={path}", "data.on_bad_line=quarantine"), "--json")
    assert json.loads(done.stdout)["prompts quarantined"] == 1


def test_an_empty_file_is_refused(good: list[str], tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    refused(milepost("plan", *good, "--set", f"data.path={path}"), "empty.jsonl")


def test_prompts_that_are_all_too_long_are_refused(good: list[str]) -> None:
    too_short = settings("model.context_length=3", "rollout.max_new_tokens=1")
    refused(milepost("plan", *good, *too_short), "16", "3")


def test_messages_without_a_chat_template_are_refused(good: list[str], tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}\n')
    wanted = settings(f"data.path={path}", "data.apply_chat_template=true")
    refused(milepost("plan", *good, *wanted), "chat template")


def test_a_run_name_that_is_no_folder_is_refused(good: list[str]) -> None:
    refused(milepost("train", *good, "--run", "../elsewhere"), "'../elsewhere'")


def test_an_unknown_command_is_one_sentence() -> None:
    refused(milepost("trian"), "trian")


def test_a_query_of_an_unknown_run_is_one_sentence(tmp_path: Path) -> None:
    refused(milepost("sql", "nothing", "select 1", cwd=tmp_path), "'nothing'")


def test_grade_prints_a_verdict() -> None:
    done = milepost("grade", "exact", "--response", " 4 ", "--label", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["score"] == 1.0


def test_debug_shows_the_traceback() -> None:
    done = milepost("plan", "--set", "nothing", "--debug")
    assert "Traceback" in done.stderr and "must look like" in done.stderr
