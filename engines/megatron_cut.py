"""From the samples of a table to the micro-batches that this rank makes its passes over, by the rules of the run."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core import parallel_state

from milepost.engines.flops import sample_cost
from milepost.engines.megatron_batch import MicroBatch, Sample, micro_batch
from milepost.engines.megatron_model import device
from milepost.engines.megatron_world import row_split
from milepost.engines.model_layout import ModelShape
from milepost.storage.micro_batches import MicroBatches, micro_batches, packing_rules
from milepost.storage.parameters import ModelSection
from milepost.storage.training import PerfSection


@dataclass(frozen=True)
class CutSamples:
    """Samples of a batch, and which of them share a pass on which data-parallel rank."""

    samples: list[Sample]
    rows: MicroBatches

    @property
    def metrics(self) -> dict[str, float]:
        return self.rows.metrics({sample.row: sample.tokens for sample in self.samples})


class Cutter:
    """Cuts batches for policy and critic alike, as both are split over the same ranks."""

    def __init__(self, shape: ModelShape, model: ModelSection, perf: PerfSection) -> None:
        self._model, self._rules = model, packing_rules(model, perf)
        self._cost = sample_cost(shape, self._rules.balance)

    def cut(self, samples: list[Sample]) -> CutSamples:
        rows = micro_batches({sample.row: sample.tokens for sample in samples}, self._rules, self._cost)
        return CutSamples(samples, rows)

    def own(self, cut: CutSamples, names: Sequence[str] = ()) -> list[MicroBatch]:
        """This rank's micro-batches on its device, with the columns `names`."""
        known = {sample.row: sample for sample in cut.samples}
        packing, ranks = cut.rows.rules.packing, row_split(self._model)
        return [
            micro_batch([known[row] for row in part], list(names), device(), packing=packing, ranks=ranks)
            for part in cut.rows.rows[parallel_state.get_data_parallel_rank()]
        ]
