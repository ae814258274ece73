"""Flags of the SGLang server, checked before anything is started."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.sglang_flags import (
    Flag,
    SglangMissing,
    check_flags,
    check_sglang,
    command_line,
    environment,
    known_flags,
    server_flags,
)
from milepost.flows.plan import make_plan
from milepost.flows.recipe import load_recipe
from milepost.storage.parameters import Parameters

KNOWN = {
    "attention_backend": Flag("--attention-backend", switch=False, choices=("fa3", "triton")),
    "chunked_prefill_size": Flag("--chunked-prefill-size", switch=False, number="int"),
    "mem_fraction_static": Flag("--mem-fraction-static", switch=False, number="float"),
    "disable_radix_cache": Flag("--disable-radix-cache", switch=True),
    "fp8_gemm_runner_backend": Flag("--fp8-gemm-backend", switch=False),
    "dllm_fdfo": Flag("--dllm-fdfo", switch=True, off="--no-dllm-fdfo"),
    "cuda_graph_bs_decode": Flag("--cuda-graph-bs-decode", switch=False, several=True, number="int"),
    "tp_size": Flag("--tensor-parallel-size", switch=False, spellings=("tensor_parallel_size", "tp")),
}


def parameters(**engines: Any) -> Parameters:
    return Parameters.model_validate({"engines": {"rollout": "sglang", **engines}})


def test_an_unknown_flag_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(LookupError, match="SGLang has no flag 'atention_backend', did you mean 'attention_backend'?"):
        check_flags({"atention_backend": "fa3"}, KNOWN)
    with pytest.raises(LookupError, match="no flag 'tensor_parallel_size', did you mean 'tp_size'?"):
        check_flags({"tensor_parallel_size": 2}, KNOWN)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp_size": 2}, "engines.sglang.tp_size is set from engines.gpus_per_engine: use that"),
        ({"port": 30000}, "engines.sglang.port is Milepost's to choose: leave it out"),
        ({"disable_radix_cache": "yes"}, "disable_radix_cache is 'yes', expected true or false"),
        ({"attention_backend": True}, "attention_backend is True, expected a value"),
        ({"chunked_prefill_size": "lots"}, "engines.sglang.chunked_prefill_size is 'lots', expected a whole number"),
        ({"mem_fraction_static": "half"}, "engines.sglang.mem_fraction_static is 'half', expected a number"),
        ({"cuda_graph_bs_decode": "1 2 x"}, "cuda_graph_bs_decode is '1 2 x', expected a whole number"),
    ],
)
def test_a_flag_that_milepost_sets_and_a_value_that_cannot_be_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_flags(flags, KNOWN)


def test_a_value_that_a_flag_does_not_have_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(LookupError, match="attention_backend is 'tritn', did you mean 'triton'.; known: fa3, triton"):
        check_flags({"attention_backend": "tritn"}, KNOWN)
    check_flags({"attention_backend": "fa3", "chunked_prefill_size": -1, "mem_fraction_static": 0.5}, KNOWN)


def test_sglang_says_itself_which_values_its_flags_take(sglang_python: str) -> None:
    known = known_flags(sglang_python)
    assert known["chunked_prefill_size"].number == "int" and known["mem_fraction_static"].number == "float"
    assert {"triton", "fa3"} <= set(known["attention_backend"].choices)


def test_the_command_line_has_the_servers_own_spelling() -> None:
    flags = {"disable_radix_cache": True, "fp8_gemm_runner_backend": "auto", "dllm_fdfo": False}
    found = command_line({**flags, "cuda_graph_bs_decode": "1 2 4", "tp_size": 2}, KNOWN)
    wanted = "--disable-radix-cache --fp8-gemm-backend auto --no-dllm-fdfo --cuda-graph-bs-decode 1 2 4"
    assert found == [*wanted.split(), "--tensor-parallel-size", "2"]
    assert command_line({"disable_radix_cache": False}, KNOWN) == []


def test_an_interpreter_without_sglang_is_told_how_to_get_it(model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    chosen = parameters(sglang_python=sys.executable)
    sections = {"model": {"path": model_dir}, "data": {"path": str(tmp_path / "prompts.jsonl")}}
    chosen = Parameters.model_validate({**chosen.model_dump(), **sections, "algorithm": {"num_steps_per_rollout": 1}})
    knobs = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
    chosen = chosen.model_copy(update={"data": chosen.data.model_copy(update=knobs)})
    with pytest.raises(SglangMissing, match="sglang is not installed for .*: pip install 'milepost.sglang.'"):
        make_plan("run", str(tmp_path), 1, chosen)
    with pytest.raises(SglangMissing, match="'/nowhere/python' cannot be run"):
        check_sglang(parameters(sglang_python="/nowhere/python"))


def test_servers_that_run_already_are_one_for_each_engine_and_take_no_flags() -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    check_sglang(parameters(sglang_urls=urls, rollout_engines=2))
    with pytest.raises(ValueError, match="engines.sglang_urls has 2 servers for 1 engines"):
        check_sglang(parameters(sglang_urls=urls))
    with pytest.raises(ValueError, match="cannot change servers that run already"):
        check_sglang(parameters(sglang_urls=urls, rollout_engines=2, sglang={"log_level": "info"}))


def test_what_other_parameters_need_of_the_server_follows_from_them() -> None:
    chosen = Parameters.model_validate({"sync": {"pause_mode": "in_place"}, "perf": {"colocate": True}})
    flags = server_flags(chosen, 3, gpu=True)
    assert flags["disable_radix_cache"] and flags["enable_memory_saver"] and flags["random_seed"] == 3
    assert "disable_radix_cache" not in server_flags(Parameters(), 0, gpu=True)
    assert "enable_memory_saver" not in server_flags(chosen, 3, gpu=False)


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ({"gpus_per_engine": 2}, "engines.gpus_per_engine is 2 and there is no GPU here: set it to 1"),
        ({"sglang": {"attention_backend": "fa3"}}, "attention_backend is 'fa3' and there is no GPU here: leave it out"),
        ({"sglang": {"device": "cuda"}}, "engines.sglang.device is 'cuda' and there is no GPU here"),
    ],
)
def test_what_needs_a_gpu_is_refused_where_there_is_none(engines: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server_flags(parameters(**engines), 0, gpu=False)
    server_flags(parameters(**engines), 0, gpu=True)


def test_a_cpu_whose_cores_are_assigned_may_hold_a_split_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    server_flags(parameters(gpus_per_engine=2), 0, gpu=False)


def test_a_server_whose_model_died_makes_no_dumps_unless_somebody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "true")
    found = environment(gpu=True)
    assert found["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "false" and found["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "true"


@pytest.mark.parametrize("name", ["smollm2-gpu", "qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b"])
def test_recipes_name_flags_that_sglang_has(name: str, sglang_python: str) -> None:
    chosen, _ = load_recipe(name, [])
    check_flags(chosen.engines.sglang, known_flags(sglang_python))
