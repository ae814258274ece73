"""A trainer without rollout engines, for what needs none: replays and supervised fine-tuning."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from types import MappingProxyType

from milepost.engines.fleet import create_trainer
from milepost.engines.gpu_placement import reserved
from milepost.engines.protocols import TrainEngine
from milepost.flows.engine_slots import engine_slots
from milepost.storage.parameters import Parameters


def without_rollout(parameters: Parameters) -> Parameters:
    """`parameters` of a run whose rollout engines use no GPU and no core."""
    return parameters.model_copy(update={"engines": parameters.engines.model_copy(update={"rollout": "fake"})})


@asynccontextmanager
async def trainer_alone(
    name: str,
    parameters: Parameters,
    model_dir: str,
    others: Mapping[str, str] = MappingProxyType({}),
    *,
    waiting: AbstractContextManager[None] = nullcontext(),
) -> AsyncIterator[TrainEngine]:
    """The trainer of a run, `waiting` for its turn, alone on its GPUs if there are any; it ends with the block."""
    alone = without_rollout(parameters)
    async with engine_slots(alone, waiting):
        with reserved(name, alone):
            trainer = create_trainer(name, alone, model_dir, others)
            try:
                await asyncio.to_thread(trainer.load)
                yield trainer
            finally:
                trainer.close()
