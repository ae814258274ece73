"""Trainer ranks and rollout engines get GPUs of their own, or share them when they are colocated."""

import subprocess
import sys

import pytest

from milepost.engines.gpu_placement import check_gpus, slots
from milepost.storage.parameters import EnginesSection, EvalSection, ModelSection, Parameters
from milepost.storage.training import PerfSection


def parameters(*, colocate: bool, urls: tuple[str, ...] = ()) -> Parameters:
    engines = EnginesSection(rollout="sglang", rollout_engines=2, gpus_per_engine=2, sglang_urls=list(urls))
    return Parameters(model=ModelSection(tensor_parallel=2), perf=PerfSection(colocate=colocate), engines=engines)


def test_engines_come_after_the_trainer_or_on_the_same_gpus() -> None:
    assert slots(parameters(colocate=False)).engines == [[2, 3], [4, 5]]
    assert slots(parameters(colocate=True)).engines == [[0, 1], [2, 3]]


def test_a_trainer_has_a_gpu_for_each_product_of_its_splits() -> None:
    split = ModelSection(tensor_parallel=2, pipeline_parallel=3, context_parallel=2, data_parallel=2)
    assert slots(Parameters(model=split)).ranks == list(range(24))


def test_engines_elsewhere_and_engines_on_the_cpu_need_no_gpu() -> None:
    assert slots(parameters(colocate=False, urls=("http://a", "http://b"))).count == 2
    assert slots(Parameters(engines=EnginesSection(train="fake"))).count == 0


def test_a_spare_engine_has_gpus_that_nobody_else_has_or_is_refused() -> None:
    spare = {"eval": EvalSection(every_steps=2, spare_engine=True)}
    shared, apart = (parameters(colocate=found).model_copy(update=spare) for found in (True, False))
    assert (slots(shared).spare, slots(apart).spare) == ([4, 5], [6, 7])
    with pytest.raises(ValueError, match=r"eval.spare_engine needs 6 GPUs, 4 for trainer .* there are 4: turn it off"):
        check_gpus(shared, 4)
    one = Parameters(perf=PerfSection(colocate=True), engines=EnginesSection(rollout="sglang"), **spare)
    with pytest.raises(ValueError, match="needs 2 GPUs, 1 for trainer and rollout engines and 1 for itself"):
        check_gpus(one, 1)


def test_too_few_gpus_say_how_many_and_which_knobs() -> None:
    with pytest.raises(ValueError, match=r"6 GPUs are needed \(2 trainer ranks, 2 rollout engines of 2\) .* 4: lower"):
        check_gpus(parameters(colocate=False), 4)
    check_gpus(parameters(colocate=True), 4)
    check_gpus(parameters(colocate=False), 0)


REAL = """
import os, ray
from milepost.engines import cluster, gpu_placement as placement
from milepost.storage.parameters import EnginesSection, ModelSection, Parameters
from milepost.storage.training import PerfSection

class Looks:
    def sees(self): return os.environ["CUDA_VISIBLE_DEVICES"]

ray.init(address="local", num_cpus=1, num_gpus=2, namespace=cluster.NAMESPACE, include_dashboard=False)
engines = EnginesSection(rollout="sglang", gpus_per_engine=2)
shared = Parameters(model=ModelSection(tensor_parallel=2), perf=PerfSection(colocate=True), engines=engines)
with placement.reserved("run", shared):
    shares = [*placement.rank_shares("run", shared), placement.engine_share("run", 0, shared)]
    actors = [cluster.start_actor(Looks, str(index), resources=s.options()) for index, s in enumerate(shares)]
    print("seen", *(cluster.wait(actor.sees.remote(), 60, what="a look") for actor in actors))
assert placement.rank_shares("run", shared) is None
"""


@pytest.mark.slow
def test_each_process_sees_its_own_gpus() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=120)
    assert "seen 0 1 0,1" in done.stdout, done.stderr
