"""What rank 0 of a trainer does to send its weights into running engines: each gets all of them, or none that count.

The order is flush, begin, buckets, check, version, end, on engines that are paused. One that fails is left out of the
rest. What can be done before an engine is asked for anything is: the digest is known, the first bucket is gathered.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack

from milepost.engines.protocols import PushReport, WeightVersion
from milepost.engines.weight_buckets import Named, buckets
from milepost.engines.weight_carriers import Carrier
from milepost.engines.weight_checksums import SentTensors
from milepost.engines.weight_targets import Targets
from milepost.storage.parameters import SyncSection


class Laps:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.monotonic()

    def lap(self, name: str) -> float:
        """The time since the last lap was spent on `name`; what the clock says."""
        last, self._last = self._last, time.monotonic()
        self.seconds[name] += self._last - last
        return self._last


def push_tensors(
    tensors: Iterable[Named],
    urls: Sequence[str],
    version: WeightVersion,
    *,
    names: Collection[str],
    sync: SyncSection,
    carrier: Carrier,
) -> PushReport:
    """Send `tensors`, which are read to their end whatever happens, into the engines at `urls` as `version`.

    Of the metrics, `gather`, `send` and `check` are where time went, `transfer` all of it from the first word to an
    engine to the last: gathering the first bucket is not in it.
    """
    laps, size = Laps(), 0
    targets = Targets(urls, sync.timeout_seconds)
    left = iter(tensors)
    with ExitStack() as closing:
        closing.callback(targets.close)
        closing.callback(carrier.settle, targets)
        closing.callback(_read_to_end, left)  # the other ranks take part in gathering every tensor
        carrier.open(targets)
        splits = {link.ranks for link in targets.links.values() if not link.is_embedded}
        sent = SentTensors(names, sync.checksum, seed=str(version), splits=splits)
        closing.callback(sent.close)
        laps.lap("open")
        for bucket in buckets(left, sync.bucket_bytes):
            gathered = laps.lap("gather")
            if not size:
                started = gathered
                targets.each(lambda link: link.begin(version, sync.pause_mode))
                laps.lap("begin")
            size += sum(tensor.nbytes for _, tensor in bucket)
            if targets.links:
                carrier.send(targets, bucket)
                sent.remember(bucket)
            del bucket  # or it were alive while the next is gathered
            laps.lap("send")
        carrier.settle(targets)
        laps.lap("send")
        targets.each(lambda link: link.finish(version, sent))
        transfer = laps.lap("check") - started
    metrics = {f"{name}_seconds": seconds for name, seconds in laps.seconds.items()}
    return PushReport(version, dict(targets.failed), metrics | {"bytes": float(size), "transfer_seconds": transfer})


def _read_to_end(tensors: Iterator[Named]) -> None:
    for _ in tensors:
        pass
