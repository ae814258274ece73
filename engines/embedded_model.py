"""A transformers model that decodes rows of sequences together, on keys and values it keeps itself.

A sequence joins with all but the last token of its prompt; that one is read by its first `step`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from milepost.engines import embedded_weights
from milepost.engines.digest import weights_digest
from milepost.engines.embedded_cache import PrefillCache, SlotCache
from milepost.engines.embedded_sequence import Sequence
from milepost.engines.sampling import SamplingRows, draw, sampling_rows, vocabulary_columns
from milepost.engines.weight_chain import rebuild

PREFILL_TOKENS = 4096  # most tokens, padding included, of one prefill pass; a longer prompt goes alone
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EmbeddedModel:
    """See SequenceModel. Not thread-safe, but for `stage_weights`."""

    def __init__(
        self, model_dir: str, *, dtype: str, context_length: int, max_rows: int, trust_remote_code: bool = False
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected one of {sorted(_DTYPES)}")
        self._model = _load(Path(model_dir), _DTYPES[dtype], trust_remote_code)
        config = self._model.config.get_text_config()
        _check_attention(config, context_length)
        self.vocab_size: int = self._model.get_output_embeddings().weight.shape[0]
        self.context_length = min(context_length, config.max_position_embeddings)
        self._cache = SlotCache(layers=config.num_hidden_layers, max_rows=max_rows, max_length=self.context_length)
        # transformers renamed the argument; the old name still works where it warns.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._columns = vocabulary_columns(self.vocab_size)
        self._slots = torch.arange(self.context_length)
        self._sequences: list[Sequence] = []
        self._sampling: SamplingRows | None = None
        self._tokens = self._lengths = self._drawn = torch.empty(0, dtype=torch.int64)
        self._longest = 0

    @torch.inference_mode()
    def join(self, sequences: list[Sequence]) -> None:
        for chunk in _prefill_chunks(sequences):
            rows: dict[tuple[int, ...], int] = {}
            for sequence in chunk:
                prompt = sequence.request.input_ids
                sequence.cached_tokens = len(prompt) - 1 if prompt in rows else 0
                rows.setdefault(prompt, len(rows))
            which = torch.tensor([rows[sequence.request.input_ids] for sequence in chunk])
            self._cache.join(self._prefill([*rows]), which)
        self._sequences += sequences
        self._tokens = torch.cat([self._tokens, torch.tensor([s.request.input_ids[-1] for s in sequences])])
        self._lengths = torch.cat([self._lengths, torch.tensor([len(s.request.input_ids) - 1 for s in sequences])])
        self._drawn = torch.cat([self._drawn, torch.zeros(len(sequences), dtype=torch.int64)])
        self._membership_changed()

    @torch.inference_mode()
    def step(self) -> list[tuple[int, float] | None]:
        assert self._sampling is not None
        self._longest += 1
        self._cache.reserve(self._longest)
        self._cache.write_at(self._lengths)
        mask = self._slots[: self._cache.length] <= self._lengths[:, None]
        logits = self._forward(self._tokens[:, None], self._lengths[:, None], mask[:, None, None], self._cache)
        self._tokens, logprobs = draw(logits[:, -1].float(), self._sampling, self._drawn)
        self._lengths = self._lengths + 1
        self._drawn = self._drawn + 1
        return list(zip(self._tokens.tolist(), logprobs.tolist(), strict=True))

    @torch.inference_mode()
    def keep(self, order: list[int]) -> None:
        self._cache.keep(order)
        self._sequences = [self._sequences[row] for row in order]
        rows = torch.tensor(order, dtype=torch.int64)
        self._tokens, self._lengths, self._drawn = self._tokens[rows], self._lengths[rows], self._drawn[rows]
        self._membership_changed()

    def release(self) -> None:
        self._cache.release()

    def stage_weights(
        self, uri: str, *, expected_digest: str | None, builds_on: bool = False
    ) -> tuple[str, Callable[[], None]]:
        held = embedded_weights.live_tensors(self._model) if builds_on else None
        return self.stage_tensors(rebuild(uri, held), expected_digest=expected_digest, uri=uri)

    def stage_tensors(
        self, tensors: Mapping[str, torch.Tensor], *, expected_digest: str | None, uri: str
    ) -> tuple[str, Callable[[], None]]:
        live = embedded_weights.live_tensors(self._model)
        tensors = embedded_weights.untied(tensors, self._model)
        embedded_weights.check_fit(tensors, live, uri=uri)
        digest = weights_digest(tensors.items())
        if expected_digest is not None and not digest.startswith(expected_digest):
            raise ValueError(f"the weights in {uri!r} have digest {digest}, expected {expected_digest}: export again")
        return digest, partial(self._apply, live, tensors)

    def weights_digest(self) -> str:
        return weights_digest(embedded_weights.live_tensors(self._model).items())

    def _apply(self, live: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        if not self._sequences:
            self._cache.release()  # a slot that once held NaN would spoil whoever gets it, masked or not
        embedded_weights.copy_into(live, tensors)

    def _membership_changed(self) -> None:
        self._longest = int(self._lengths.max()) if self._sequences else 0
        self._sampling = sampling_rows(
            [sequence.request.params for sequence in self._sequences],
            self._columns,
            stop_ids=[sequence.stop_ids for sequence in self._sequences],
        )

    def _prefill(self, prompts: list[tuple[int, ...]]) -> PrefillCache:
        """Keys and values of every prompt but its last token, padded on the right, where no real token looks."""
        width = max(1, *(len(prompt) - 1 for prompt in prompts))
        ids = torch.tensor([list(prompt[:-1]) + [0] * (width + 1 - len(prompt)) for prompt in prompts])
        positions = torch.arange(width)[None]
        mask = torch.ones(width, width, dtype=torch.bool).tril_()[None, None]
        cache = PrefillCache()
        self._forward(ids, positions.expand(len(prompts), -1), mask, cache)
        return cache

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits of the last position: [rows, 1, vocabulary]."""
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            logits_to_keep=1,
            use_cache=True,
            **{self._cache_argument: cache},
        )
        logits: torch.Tensor = output.logits
        return logits


def _load(model_dir: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"model folder {str(model_dir)!r} has no config.json: give a Hugging Face model folder")
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=trust_remote_code,
    )
    return model.eval().requires_grad_(False)


def _check_attention(config: Any, context_length: int) -> None:
    """Raise ValueError for layers that do not look at the whole context: their masks are not made here."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (window is not None and getattr(config, "use_sliding_window", True))
    if kinds - {"full_attention", "sliding_attention"} or (slides and (window is None or window < context_length)):
        raise ValueError(
            f"model type {config.model_type!r} has layers of kinds {sorted(kinds)} with window {window}, and the "
            f"embedded engine runs full attention only: use another model or a context_length within the window"
        )


def _prefill_chunks(sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    """Consecutive sequences whose distinct prompts, padded to the longest, stay within PREFILL_TOKENS."""
    chunk: list[Sequence] = []
    prompts: set[tuple[int, ...]] = set()
    for sequence in sequences:
        prompts.add(sequence.request.input_ids)
        if chunk and len(prompts) * max(map(len, prompts)) > PREFILL_TOKENS:
            yield chunk
            chunk, prompts = [], {sequence.request.input_ids}
        chunk.append(sequence)
    if chunk:
        yield chunk
