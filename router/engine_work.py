"""What engines say that their answers cost them, in sums. What an engine does not say is in none of them."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any


class EngineWork:
    """The work of many requests, told apart by sample: a conversation asks several times for one."""

    def __init__(self) -> None:
        self._samples: set[str] = set()
        self._sums: defaultdict[str, float] = defaultdict(int)

    def add(self, sample_id: str, meta: Mapping[str, Any]) -> None:
        """Take what SGLang's `meta_info` tells of one request."""
        cached, accepted = meta.get("cached_tokens"), meta.get("spec_accept_rate")
        if cached is not None:
            self._samples.add(sample_id)
            self._sums["prompt_tokens"] += meta["prompt_tokens"]
            self._sums["cached_tokens"] += cached
        if accepted is not None:
            verified = meta["spec_verify_ct"]
            self._sums["verified_drafts"] += verified
            self._sums["drafted_tokens"] += meta["completion_tokens"]
            # All drafts are of one length, so that the accepted share of each may be summed.
            self._sums["accepted_shares"] += accepted * verified

    def sums(self) -> dict[str, float]:
        """By name: `samples`, `prompt_tokens` and `cached_tokens` of requests that tell what was cached of them.

        `verified_drafts`, `drafted_tokens`, which came of them, and `accepted_shares` of those that were drafted.
        """
        return dict(self._sums) | ({"samples": len(self._samples)} if self._samples else {})
