"""What rank 0 of a trainer does to send its weights into running engines: each gets all of them, or none that count.

The order is flush, begin, buckets, version, end, on engines that are paused. One that fails is left out of the rest.
"""

import time
from collections.abc import Collection, Iterable, Sequence

from milepost.engines.protocols import PushReport, WeightVersion
from milepost.engines.weight_buckets import Named, buckets
from milepost.engines.weight_carriers import Carrier
from milepost.engines.weight_checksums import SentTensors
from milepost.engines.weight_targets import Targets
from milepost.storage.parameters import SyncSection


def push_tensors(
    tensors: Iterable[Named],
    urls: Sequence[str],
    version: WeightVersion,
    *,
    names: Collection[str],
    sync: SyncSection,
    carrier: Carrier,
) -> PushReport:
    """Send `tensors`, which are read to their end whatever happens, into the engines at `urls` as `version`."""
    targets = Targets(urls, sync.timeout_seconds)
    left = iter(tensors)
    try:
        carrier.open(targets)
        splits = {link.ranks for link in targets.links.values() if not link.is_embedded}
        sent = SentTensors(names, sync.checksum, seed=str(version), splits=splits)
        started, size = time.monotonic(), 0
        targets.each(lambda link: link.begin(version, sync.pause_mode))
        for bucket in buckets(left, sync.bucket_bytes):
            if targets.links:
                sent.remember(bucket)
                carrier.send(targets, bucket)
                size += sum(tensor.nbytes for _, tensor in bucket)
        targets.each(lambda link: link.finish(version, sent))
        seconds = time.monotonic() - started
    finally:
        for _ in left:
            pass  # the other ranks take part in gathering every tensor
        targets.close()
    return PushReport(version, dict(targets.failed), {"bytes": float(size), "transfer_seconds": seconds})
