"""A critic without a model, for the fake trainer: it learns, and what it expects can be worked out by hand."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milepost.engines.protocols import UpdateResult
from milepost.storage.micro_batches import PackingRules, micro_batches, trained_lengths


class FakeCritic:
    """It expects one number everywhere, and moves half of the way to the mean of the returns that it is taught."""

    def __init__(self, packing: PackingRules) -> None:
        self._packing = packing
        self.expected = 0.0
        self._results: dict[str, UpdateResult] = {}
        self._last: UpdateResult | None = None

    def learn(self, table: pa.Table, key: str) -> UpdateResult:
        if key in self._results:
            return self._results[key]
        lengths, steps = trained_lengths(table), self._last.optimizer_step if self._last else 0
        if not lengths:
            return self._record(UpdateResult(key, False, steps, {"samples": 0.0}))
        trained = pc.list_flatten(table["loss_mask"]).to_numpy() != 0
        returns = pc.list_flatten(table["returns"]).to_numpy()[trained].astype(np.float64)
        loss = float(((returns - self.expected) ** 2).mean())
        self.expected += (float(returns.mean()) - self.expected) / 2
        rows = micro_batches(lengths, self._packing)
        metrics = {"loss": loss, "value_loss": loss, "value_clipfrac": 0.0, "grad_norm": 1.0, "lr": 0.0}
        metrics |= {"samples": float(len(lengths)), **rows.metrics(lengths)}
        return self._record(UpdateResult(key, True, steps + 1, metrics, rows.to_json()))

    def _record(self, result: UpdateResult) -> UpdateResult:
        self._last = self._results[result.key] = result
        return result

    @property
    def last_key(self) -> str:
        return self._last.key if self._last else ""

    def state(self) -> dict[str, Any]:
        return {"expected": self.expected, "last": asdict(self._last) if self._last else None}

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Take up what `state` has said."""
        self.expected = state["expected"]
        self._last = UpdateResult(**state["last"]) if state["last"] else None
        self._results = {self._last.key: self._last} if self._last else {}
