"""Which GPUs trainer ranks and rollout engines have: one Ray placement group a run, one bundle a GPU.

With `perf.colocate` a rank and an engine have shares of the same bundle, else each has bundles of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from milepost.engines import cluster
from milepost.storage.parameters import Parameters

import ray  # isort: skip  (after cluster, which sets how it authenticates)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RANK_SHARE, ENGINE_SHARE, LOOK_SHARE = 0.5, 0.4, 0.1  # of a GPU in Ray's books; together one
RESERVE_SECONDS = 60.0


@dataclass(frozen=True)
class Slots:
    """Places in a run's list of GPUs: one for each trainer rank, and those of each rollout engine.

    The `spare` engine shares its own with nothing, as it takes no turns.
    """

    ranks: list[int]
    engines: list[list[int]]
    spare: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return max([*self.ranks, *(slot for slots in self.engines for slot in slots), *self.spare], default=-1) + 1


def has_spare(parameters: Parameters) -> bool:
    """Whether a run has one more engine, for evaluations alone."""
    return parameters.eval.spare_engine and parameters.eval.every_steps > 0


def slots(parameters: Parameters) -> Slots:
    """Where everything of a run that uses a GPU goes; engines that run on the CPU or elsewhere need none."""
    engines = parameters.engines
    ranks = list(range(parameters.model.ranks)) if engines.train == "megatron" else []
    first, size = 0 if parameters.perf.colocate else len(ranks), engines.gpus_per_engine
    started = engines.rollout_engines if engines.rollout == "sglang" and not engines.sglang_urls else 0
    found = Slots(ranks, [[first + index * size + gpu for gpu in range(size)] for index in range(started)])
    if not started or not has_spare(parameters):
        return found
    return replace(found, spare=[found.count + gpu for gpu in range(size)])


def shares_gpus(parameters: Parameters) -> bool:
    """Whether trainer and rollout engines take turns on the same GPUs: a run may have only one of them."""
    return parameters.perf.colocate and "none" not in (parameters.engines.train, parameters.engines.rollout)


def check_gpus(parameters: Parameters, available: int) -> None:
    """ValueError when a cluster that has GPUs has too few; one without runs everything on the CPU."""
    wanted = slots(parameters)
    others = replace(wanted, spare=[]).count
    if others <= available < wanted.count and available:
        raise ValueError(
            f"eval.spare_engine needs {wanted.count} GPUs, {others} for trainer and rollout engines and "
            f"{len(wanted.spare)} for itself, and there are {available}: turn it off, and the run's own engines "
            "evaluate between two steps"
        )
    if available and wanted.count > available:
        raise ValueError(
            f"{wanted.count} GPUs are needed ({len(wanted.ranks)} trainer ranks, {len(wanted.engines)} rollout engines "
            f"of {parameters.engines.gpus_per_engine}) and there are {available}: lower model.*_parallel or "
            f"engines.rollout_engines{'' if parameters.perf.colocate else ', or share GPUs with perf.colocate'}"
        )


@dataclass(frozen=True)
class GpuShare:
    """A part of one bundle, for an actor that sees the GPUs `visible` (their ids on its host)."""

    group: PlacementGroup
    bundle: int
    visible: list[str]
    share: float

    def options(self) -> dict[str, Any]:
        """For Ray. The actor's GPUs are set here, because Ray knows no actor that shares several."""
        variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ",".join(self.visible)}
        return {
            "num_gpus": self.share,
            "runtime_env": {"env_vars": variables},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle),
        }


@contextmanager
def reserved(run: str, parameters: Parameters) -> Iterator[None]:
    """Hold the GPUs of `run`, if the cluster has any; ValueError when they are too few or others hold them."""
    available, wanted = int(cluster.gpus()), slots(parameters).count
    check_gpus(parameters, available)
    if not available or not wanted:
        yield
        return
    group = placement_group([{"GPU": 1}] * wanted, strategy="PACK", name=_name(run))
    try:
        if not group.wait(RESERVE_SECONDS):
            raise ValueError(f"{wanted} of {available} GPUs are needed, others hold them: stop those runs first")
        yield
    finally:
        remove_placement_group(group)


def rank_shares(run: str, parameters: Parameters) -> list[GpuShare] | None:
    """Of each trainer rank; None where nothing is reserved."""
    found = _gpus(run)
    return found and [_share(found, [slot], RANK_SHARE) for slot in slots(parameters).ranks]


def engine_share(run: str, index: int, parameters: Parameters) -> GpuShare | None:
    """Of rollout engine `index`, after which comes the spare; None where nothing is reserved, or it needs no GPU."""
    found, wanted = _gpus(run), slots(parameters)
    return _share(found, [*wanted.engines, wanted.spare][index], ENGINE_SHARE) if found and wanted.engines else None


@dataclass(frozen=True)
class _Gpu:
    node: str
    id: str
    bundle: int
    group: PlacementGroup


def _share(gpus: list[_Gpu], places: list[int], share: float) -> GpuShare:
    chosen = [gpus[place] for place in places]
    if len({gpu.node for gpu in chosen}) > 1:
        raise ValueError(f"engines.gpus_per_engine is {len(chosen)}, no host has as many GPUs left for one engine")
    return GpuShare(chosen[0].group, chosen[0].bundle, [gpu.id for gpu in chosen], share)


def _gpus(run: str) -> list[_Gpu] | None:
    """The reserved GPUs of a run, host by host in the order of their ids; None when none are reserved."""
    try:
        group = ray.util.get_placement_group(_name(run))
    except ValueError:
        return None
    return _looked_at(run, group.id.hex())


@cache
def _looked_at(run: str, group_id: str) -> list[_Gpu]:
    """Once for each reservation: Ray takes seconds to start a process on every GPU."""
    group = ray.util.get_placement_group(_name(run))
    look = ray.remote(num_cpus=0, num_gpus=LOOK_SHARE, max_retries=0)(_look)
    bundles = range(group.bundle_count)
    asked = [look.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, b)).remote() for b in bundles]
    seen = [cluster.wait(ref, RESERVE_SECONDS, what="the id of a GPU") for ref in asked]
    return sorted((_Gpu(*found, bundle, group) for bundle, found in enumerate(seen)), key=_order)


def _order(gpu: _Gpu) -> tuple[str, int, str]:
    return gpu.node, len(gpu.id), gpu.id  # 10 after 9


def _look() -> tuple[str, str]:
    (gpu,) = ray.get_gpu_ids()
    return ray.get_runtime_context().get_node_id(), str(gpu)


def _name(run: str) -> str:
    return f"{run}/gpus"
