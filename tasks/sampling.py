"""How samples are drawn, in SGLang's terms, and with which seeds."""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from milepost.storage.parameters import ModelSection, RolloutSection
from milepost.tasks.tools import ToolRules

REFILLS = 3
"""Times that a lost sample is asked for again with `filter.partial_groups=refill`."""

_OPTIONAL = ("refills", "partial", "mask_older_tokens", "tools")
_ASIDE = ("vocabulary", "tokenizer")


@dataclass(frozen=True)
class TokenizerFolder:
    """A model folder with a tokenizer, whose code may be run when it is `trusted`."""

    path: str
    trusted: bool = False

    @staticmethod
    def of(model: ModelSection, folder: str) -> "TokenizerFolder":
        return TokenizerFolder(folder, model.trust_remote_code)


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn. `params` is SGLang's `sampling_params`, less the seed.

    `refills` is how often a sample that was lost is asked for again, `vocabulary` how many token ids there are, 0 when
    that is not known, `tools` what conversations may call and `tokenizer` what tells them of results; the others are
    parameters of the rollout section.
    """

    function: str
    params: dict[str, Any]
    n_samples_per_prompt: int
    context_length: int
    seed: int
    refills: int = 0
    partial: bool = False
    mask_older_tokens: bool = False
    vocabulary: int = 0
    tools: ToolRules | None = None
    tokenizer: TokenizerFolder | None = None

    def identity(self) -> dict[str, Any]:
        """What decides the samples: not what they are checked against, nor what nobody asked for."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in _ASIDE and (value or name not in _OPTIONAL)
        }


def sampling_seed(seed: int, sample_id: str) -> int:
    """A seed in [0, 2**31) that depends on the run's seed and the sample alone, never on order or batch."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def sampling_params(rollout: RolloutSection) -> dict[str, Any]:
    """SGLang's `sampling_params` for a rollout section."""
    params: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_new_tokens": rollout.max_new_tokens,
    }
    return params | ({"stop": rollout.stop} if rollout.stop else {})
