"""What a run takes of a GPU's memory is known before anything starts."""

import pytest

from milepost.engines.memory_plan import GIB, LOGITS_BYTES, cache_bytes, check_memory, engine_weights, trainer_memory
from milepost.storage.parameters import EnginesSection, ModelSection, Parameters
from milepost.storage.training import AlgorithmSection, PerfSection

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
COUNT = 4_022_468_096


def parameters(recompute: str = "none", **model: int) -> Parameters:
    perf = PerfSection(dtype="bfloat16", recompute=recompute, colocate=True)
    return Parameters(model=ModelSection(**model), perf=perf, engines=EnginesSection(rollout="sglang"))


def test_state_is_counted_by_the_bytes_of_each_part() -> None:
    found = trainer_memory(QWEN3_4B, parameters())
    assert (found.weights, found.gradients, found.optimizer) == (2 * COUNT, 4 * COUNT, 12 * COUNT)
    assert found.logits == 2 * 2 * 8192 * 151936


def test_logits_of_a_large_micro_batch_are_not_there_at_once() -> None:
    large = parameters().model_copy(update={"perf": PerfSection(dtype="bfloat16", max_tokens_per_micro_batch=65536)})
    assert trainer_memory(QWEN3_4B, large).logits == 2 * LOGITS_BYTES


def test_a_critic_takes_as_much_again_but_for_its_head() -> None:
    critic = parameters().model_copy(update={"algorithm": AlgorithmSection(advantage="gae")})
    alone, beside = trainer_memory(QWEN3_4B, parameters()), trainer_memory(QWEN3_4B, critic)
    assert (beside.weights, beside.gradients) == (2 * alone.weights + 2 * 2560, 2 * alone.gradients + 4 * 2560)
    assert (beside.logits, beside.activations) == (alone.logits, alone.activations)
    untied = QWEN3_4B | {"tie_word_embeddings": False}
    assert trainer_memory(untied, critic).weights == beside.weights + 2 * 151936 * 2560  # the policy's output layer


def test_data_parallel_ranks_share_the_optimizer_and_tensor_parallel_ranks_everything() -> None:
    assert trainer_memory(QWEN3_4B, parameters(data_parallel=2)).optimizer == 6 * COUNT
    assert trainer_memory(QWEN3_4B, parameters(tensor_parallel=2)).weights == COUNT


def test_context_parallel_ranks_share_a_micro_batch_and_the_optimizer() -> None:
    alone, two = (trainer_memory(QWEN3_4B, parameters(context_parallel=ranks)) for ranks in (1, 2))
    assert (two.logits, two.optimizer) == (2 * 2 * 4096 * 151936, 6 * COUNT)
    assert (two.weights, two.gradients) == (alone.weights, alone.gradients)
    assert alone.activations / 2 < two.activations < alone.activations  # keys and values are of all ranks


def test_sequence_parallel_ranks_share_what_tensor_parallel_ones_each_have() -> None:
    tensor, sequence = (
        trainer_memory(QWEN3_4B, parameters(tensor_parallel=2, sequence_parallel=on)) for on in (False, True)
    )
    kept = 37 * 4 * 2560  # residual streams and normalised inputs of 36 layers, and of the one that is computed
    assert tensor.activations - sequence.activations == 2 * 8192 * kept // 2


def test_recomputation_keeps_less() -> None:
    kept = [trainer_memory(QWEN3_4B, parameters(recompute)).activations for recompute in ("full", "selective", "none")]
    assert kept == sorted(kept) and len(set(kept)) == 3


def test_a_model_that_does_not_fit_says_how_much_and_which_knob() -> None:
    check_memory(QWEN3_4B, parameters(), 140 * GIB)
    with pytest.raises(ValueError, match=r"needs about 1\d\d.\d GiB .*67.4 for weights.*has 40.0: raise model.tensor"):
        check_memory(QWEN3_4B, parameters(), 40 * GIB)
    with pytest.raises(ValueError, match="has 80.0: lower perf.max_tokens_per_micro_batch or set perf.recompute=full"):
        check_memory(QWEN3_4B, parameters(), 80 * GIB)


def engine(gpus: int, fraction: float, *, train: str = "fake", context_length: int = 4096) -> Parameters:
    chosen = EnginesSection(
        train=train, rollout="sglang", gpus_per_engine=gpus, sglang={"mem_fraction_static": fraction}
    )
    model = ModelSection(context_length=context_length)
    return Parameters(model=model, perf=PerfSection(dtype="bfloat16"), engines=chosen)


def test_gpus_of_an_engine_share_its_weights_and_its_cache() -> None:
    assert engine_weights(QWEN3_4B, engine(2, 0.5)) == COUNT
    assert cache_bytes(QWEN3_4B, engine(1, 0.5)) == 2 * 36 * 8 * 128 * 2
    assert cache_bytes(QWEN3_4B, engine(2, 0.5)) == 36 * 8 * 128 * 2


def test_an_engine_that_does_not_fit_says_how_much_and_which_knob() -> None:
    check_memory(QWEN3_4B, engine(1, 0.9), 24 * GIB)
    check_memory(QWEN3_4B, engine(2, 0.2), 24 * GIB)
    with pytest.raises(
        ValueError, match=r"needs 7.5 GiB of a GPU .* 0.6 to cache .* take 4.8: raise engines.gpus_per_"
    ):
        check_memory(QWEN3_4B, engine(1, 0.2), 24 * GIB)
    with pytest.raises(ValueError, match=r"17.6 to cache one request, .* or lower model.context_length"):
        check_memory(QWEN3_4B, engine(1, 0.9, context_length=128_000), 24 * GIB)


def test_servers_that_run_already_have_memory_of_their_own() -> None:
    attached = EnginesSection(train="fake", rollout="sglang", sglang_urls=["http://127.0.0.1:1"])
    check_memory(QWEN3_4B, Parameters(engines=attached), GIB)
