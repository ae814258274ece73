"""What a rollout function may spend on a sample, and the tools that it may call for it."""

from dataclasses import dataclass
from typing import Any

from milepost.tasks.tools import Toolbox


@dataclass(frozen=True)
class RolloutParams:
    """What a rollout function may spend on one sample. `sampling` is SGLang's `sampling_params`, seed included.

    `tools` is what `rollout.tools` names.
    """

    sample_id: str
    sampling: dict[str, Any]
    context_length: int
    tools: Toolbox | None = None
