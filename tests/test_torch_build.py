"""A torch that cannot use the GPUs of its machine is found before anything starts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from milepost.engines import torch_build
from milepost.flows import doctor
from milepost.flows.plan import make_plan
from milepost.flows.recipe import load_recipe

from .conftest import Prompts

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver."
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts another torch, and an nvidia-smi that prints `driver`, before those of this machine."""

    def write(version: str, cuda: str | None, problem: str, *, driver: str = "echo 143771") -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(
            f"__version__ = {version!r}\n"
            f"class version: cuda = {cuda!r}\n"
            f"class cuda:\n    def init(): raise RuntimeError({problem!r})\n"
        )
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        torch_build.probe.cache_clear()

    yield write
    torch_build.probe.cache_clear()


def test_a_cpu_build_on_a_machine_with_gpus_is_refused_with_the_index_to_use(install: Install) -> None:
    install("2.13.0+cpu", None, "Torch not compiled with CUDA enabled")
    with pytest.raises(
        ValueError, match=r"torch 2.13.0\+cpu is built without CUDA and this machine has GPUs: .*/cu130"
    ):
        torch_build.require_cuda()


def test_a_build_for_a_newer_cuda_than_the_drivers_is_refused_with_torchs_own_reason(install: Install) -> None:
    install("2.13.0+cu130", "13.0", OLD_DRIVER)
    wanted = (
        r"built for CUDA 13.0, cannot use .* \(The NVIDIA driver on your system is too old \(found version 12040\)\)"
    )
    with pytest.raises(
        ValueError, match=wanted + ": update the NVIDIA driver, or install a torch built for a CUDA before"
    ):
        torch_build.require_cuda()


def test_the_doctor_says_so_too(install: Install) -> None:
    install("2.13.0+cpu", None, "Torch not compiled with CUDA enabled")
    check = doctor.torch()
    assert not check.ok and "without CUDA" in check.found and torch_build.CUDA_INDEX in check.fix
    assert doctor.gpu() == doctor.Check("GPU", True, "140.4 GiB of memory each", "")


def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(install: Install) -> None:
    install("2.13.0+cu130", "13.0", "", driver="echo 'Driver/library version mismatch' >&2; exit 18")
    check = doctor.gpu()
    assert not check.ok and "code 18: Driver/library version mismatch" in check.found and check.fix
    assert doctor.torch().ok


def test_gpus_that_are_hidden_are_not_asked_for(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("2.13.0+cpu", None, "Torch not compiled with CUDA enabled")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.torch().ok and "everything runs on the CPU" in doctor.gpu().found


def test_a_run_whose_trainer_would_fall_back_to_the_cpu_is_refused(
    install: Install, model_dir: str, prompts: Prompts, tmp_path: Path
) -> None:
    knobs = ["data.rollout_batch_size=2", "data.n_samples_per_prompt=2", "algorithm.num_steps_per_rollout=1"]
    own = [f"model.path={model_dir}", f"data.path={prompts()}", "model.context_length=64", "rollout.max_new_tokens=8"]
    parameters, _ = load_recipe(None, [*knobs, *own, "data.apply_chat_template=false", "reward.name=exact"])
    install("2.13.0+cpu", None, "Torch not compiled with CUDA enabled")
    with pytest.raises(ValueError, match="is built without CUDA and this machine has GPUs"):
        make_plan("run", str(tmp_path / "runs"), 1, parameters)
