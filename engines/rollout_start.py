"""Rollout engines as the parameters of a run describe them: which class serves, on which GPUs, with which flags."""

from collections.abc import Mapping
from typing import Any

from milepost.engines import cluster
from milepost.engines.gpu_placement import engine_share
from milepost.engines.rollout_actor import RolloutActor, create_rollout_engine, serve
from milepost.engines.served_engine import EmbeddedEngine, FakeEngine
from milepost.engines.sglang_engine import SglangEngine
from milepost.engines.sglang_flags import server_flags
from milepost.storage.parameters import Parameters

ENGINES: dict[str, Any] = {"fake": FakeEngine, "embedded": EmbeddedEngine, "sglang": SglangEngine}


def _engine_options(parameters: Parameters, index: int) -> dict[str, Any]:
    if parameters.engines.rollout == "fake":
        return {}
    own = {"trust_remote_code": parameters.model.trust_remote_code}
    return own | (_sglang_options(parameters, index) if parameters.engines.rollout == "sglang" else {})


def _sglang_options(parameters: Parameters, index: int) -> dict[str, Any]:
    engines, gpu = parameters.engines, cluster.gpus() > 0
    attach_url = engines.sglang_urls[index] if engines.sglang_urls else ""
    return {
        "python": engines.sglang_python,
        "flags": server_flags(parameters, index, gpu=gpu),
        "attach_url": attach_url,
        "tensor_parallel": engines.gpus_per_engine,
        "call_seconds": parameters.sync.timeout_seconds,
        "start_seconds": 0.9 * engines.start_timeout_seconds,  # its own error is to come before the caller's
        "gpu": gpu,
    }


def create_rollout(
    run: str, index: int, parameters: Parameters, model_dir: str, *, options: Mapping[str, Any] | None = None
) -> RolloutActor:
    """The process of rollout engine `index`, which will serve the weights of `model_dir`; its caller owns it."""
    share = engine_share(run, index, parameters)
    return create_rollout_engine(
        run,
        index,
        engine_class=ENGINES[parameters.engines.rollout],
        call_timeout_seconds=parameters.sync.timeout_seconds,
        model_dir=model_dir,
        threads=parameters.engines.rollout_threads,
        max_running_requests=parameters.engines.max_running_requests,
        context_length=parameters.model.context_length,
        dtype=parameters.perf.dtype,
        resources=share.options() if share else None,
        **(options or _engine_options(parameters, index)),
    )


def start_rollout(run: str, index: int, parameters: Parameters, model_dir: str) -> RolloutActor:
    """Start rollout engine `index`, with the weights of `model_dir`, and wait until it serves; its caller owns it."""
    engine = create_rollout(run, index, parameters, model_dir)
    serve([engine], timeout_seconds=parameters.engines.start_timeout_seconds)
    return engine
