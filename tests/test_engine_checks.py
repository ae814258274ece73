"""What cannot work is refused when a run is planned, with the value and what to set."""

from typing import Any

import pytest

from milepost.flows.engine_checks import check_engines, check_transport
from milepost.storage.parameters import Parameters


def parameters(**sections: Any) -> Parameters:
    return Parameters.model_validate(sections)


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_fake_engines_take_no_tensors(transport: str) -> None:
    for train in ("fake", "megatron"):
        with pytest.raises(ValueError, match=f"sync.transport is '{transport}' .* takes no tensors: set it to 'disk'"):
            check_engines(parameters(engines={"train": train, "rollout": "fake"}, sync={"transport": transport}))


@pytest.mark.parametrize("rollout", ["embedded", "sglang"])
def test_a_fake_trainer_has_no_weights_for_a_real_engine(rollout: str) -> None:
    with pytest.raises(ValueError, match=f"makes no weights that engines.rollout '{rollout}' could load: set both"):
        check_engines(parameters(engines={"train": "fake", "rollout": rollout}))


@pytest.mark.parametrize(
    ("section", "urls", "message"),
    [
        ({}, [], "is on and nothing is evaluated: set eval.every_steps, or turn it off"),
        ({"every_steps": 2}, ["http://a"], "engines.sglang_urls names servers that run already, beside which none"),
    ],
)
def test_a_spare_engine_that_cannot_be_or_has_nothing_to_do_is_refused(
    section: dict[str, Any], urls: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_engines(
            parameters(eval={"spare_engine": True, **section}, engines={"rollout": "sglang", "sglang_urls": urls})
        )


def test_engines_that_go_together_are_taken() -> None:
    check_engines(parameters(engines={"train": "fake", "rollout": "fake"}, sync={"transport": "delta"}))
    check_engines(parameters(engines={"train": "megatron", "rollout": "fake"}))
    check_engines(parameters(engines={"rollout": "sglang"}, sync={"transport": "tensor"}))


@pytest.mark.parametrize(
    ("transport", "colocate", "engines", "message"),
    [
        ("distributed", True, 1, "NCCL takes one member on each GPU: turn perf.colocate off"),
        ("tensor", False, 1, "reaches only an engine on the trainer's first GPU: have one rollout engine"),
        ("tensor", True, 2, "or set it to 'distributed' or 'delta'"),
    ],
)
def test_a_push_that_cannot_reach_an_engines_gpu_is_refused(
    transport: str, colocate: bool, engines: int, message: str
) -> None:
    chosen = {"rollout": "sglang", "rollout_engines": engines}
    with pytest.raises(ValueError, match=message):
        check_transport(parameters(sync={"transport": transport}, perf={"colocate": colocate}, engines=chosen))


def test_pushes_that_reach_it_are_taken() -> None:
    for transport, colocate in (("tensor", True), ("distributed", False), ("disk", True), ("delta", False)):
        check_transport(
            parameters(sync={"transport": transport}, perf={"colocate": colocate}, engines={"rollout": "sglang"})
        )
