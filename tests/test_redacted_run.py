"""A whole run whose parameters hold secrets: it works with them, and nothing that outlives it has them."""

import asyncio
from pathlib import Path

import pytest

from milepost.flows.launch import check
from milepost.flows.recipe import Request
from milepost.flows.report import write_report
from milepost.flows.sql import as_rows, query
from milepost.flows.train import resume
from milepost.storage import attempts, files
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify

from .test_train_fake import parameters, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

KEY, LOGIN, LATER = "Zq-7secret-of-the-grader", "Zq8secretlogin", "Zq-9secret-that-came-later"


def overrides(root: Path, key: str) -> list[str]:
    return [
        "reward.name=tests.rewards_for_tests:keyed",
        f'reward.options={{"api_key": "{key}", "url": "https://me:{LOGIN}@host/grade?token={LOGIN}"}}',
        "data.shuffle=false",
        "tracking.enabled=true",
        f"tracking.mlflow_uri=sqlite:///{root}/mlflow.db",
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redacted")


@pytest.fixture(scope="module")
def prompts(root: Path) -> str:
    path = root / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}+1=", "label": "{number + 1}"}}\n' for number in range(8)))
    return str(path)


@pytest.fixture(scope="module")
def run(root: Path, model_dir: str, prompts: str, prefect_server: str, ray_cluster: None) -> RunFolder:
    return trained("redacted", root / "runs", parameters(model_dir, prompts, *overrides(root, KEY)), steps=1)


def holding(folder: Path, *secrets: str) -> list[str]:
    """The files below a folder whose bytes hold a secret."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in found if any(secret.encode() in path.read_bytes() for secret in secrets)]


def test_the_reward_has_its_key_and_no_verdict_tells_it(run: RunFolder) -> None:
    _, rows = as_rows(query([run], "select reason from verdicts where score is null"))
    assert rows == [("error: RuntimeError: 401 for https://***@host/grade?token=*** with ***",)] * 2
    assert as_rows(query([run], "select count(*) from rollouts where reward is not null"))[1] == [(14,)]


def test_neither_the_run_nor_mlflow_nor_prefect_holds_a_secret(run: RunFolder, root: Path, state_folder: Path) -> None:
    write_report(run)
    assert files.exists(str(root / "mlflow.db")) and files.read_json(run.record)["parameters"]["reward"]["options"] == {
        "api_key": "***",
        "url": "https://***@host/grade?token=***",
    }
    told = "rewards_for_tests:keyed"  # which Prefect's database has of the same section
    assert holding(root / "runs", told) and holding(root, KEY, LOGIN) == []
    assert holding(state_folder, told) and holding(state_folder, KEY, LOGIN) == []


def test_going_on_asks_for_the_secret_and_takes_another_one(
    run: RunFolder, root: Path, model_dir: str, prompts: str, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_root = str(root / "runs")
    with pytest.raises(ValueError, match="reward.options.api_key is a secret and stored as '\\*\\*\\*' only"):
        asyncio.run(resume(run="redacted", root=runs_root, steps=2))
    assert attempts.attempts(run) == []
    monkeypatch.setenv("GRADER_KEY", LATER)
    chosen = parameters(model_dir, prompts, *overrides(root, "env:GRADER_KEY"))
    check(Request("redacted", runs_root, 2, chosen), [])
    trained("redacted", root / "runs", chosen, steps=2)
    (attempt,) = attempts.attempts(run)
    assert attempt.changes == {"steps": [1, 2]}
    assert attempt.parameters.reward.options["api_key"] == "env:GRADER_KEY"
    assert verify(run).faults == []
    assert holding(root, KEY, LOGIN, LATER) == [] and holding(state_folder, KEY, LOGIN, LATER) == []
