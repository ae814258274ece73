"""A trainer rank that makes logits in chunks, which only a large vocabulary needs."""

from dataclasses import replace

from milepost.engines.megatron_rank import MegatronRank


class ChunkedRank(MegatronRank):
    """Three rows of float32 logits of up to 68 tokens at a time."""

    def connect(self, address: str, port: int) -> None:
        super().connect(address, port)
        passes = self._policy._passes
        if passes.layer is not None:
            passes.layer = replace(passes.layer, chunk_bytes=3 * 4 * 68 // passes.layer.group.size())
