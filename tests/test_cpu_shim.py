"""Inside the shim a request for `cuda` gives CPU tensors; outside, nothing has changed."""

import pytest
import torch

from milepost.engines.cpu_shim import CpuRngTracker, cuda_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without a GPU")


def test_tensors_asked_for_on_cuda_are_on_the_cpu() -> None:
    with cuda_on_cpu(CpuRngTracker()):
        made = [torch.zeros(2, device="cuda"), torch.ones(2).cuda(), torch.ones(2).to("cuda")]
        made.append(torch.empty(2, device=torch.cuda.current_device()))
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_type_names_are_those_of_a_gpu_and_conversions_still_work() -> None:
    with cuda_on_cpu(CpuRngTracker()):
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_nothing_is_left_behind() -> None:
    before = torch.cuda.current_device, torch.cuda.synchronize
    with cuda_on_cpu(CpuRngTracker()):
        assert torch.cuda.current_device() == torch.device("cpu")
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_named_stream_is_independent_of_the_default_one_and_continues_where_it_stopped() -> None:
    tracker = CpuRngTracker()
    tracker.add("model-parallel-rng", 7)
    wanted = torch.rand(4, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork():
        second = torch.rand(2)
    torch.testing.assert_close(torch.cat([first, second]), wanted)


def test_a_stream_that_was_not_added_is_refused() -> None:
    tracker = CpuRngTracker()
    with pytest.raises(LookupError, match="random stream 'other' was not added"), tracker.fork("other"):
        pass
