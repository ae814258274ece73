"""Megatron's optimizer takes the steps of AdamW: decoupled decay, which leaves norms and biases alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from milepost.engines.megatron_rank import MegatronRank
from milepost.engines.protocols import UpdateParams
from milepost.engines.schedule import learning_rate
from milepost.engines.train_actors import TrainSetup
from milepost.storage.parameters import ModelSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, write_table
from milepost.storage.training import OptimizerSection, PerfSection

from .test_megatron_weights import sample, save_model

pytestmark = pytest.mark.slow

PROMPT, RESPONSES = [5, 6, 7], ([11, 12, 13, 14], [21, 22])
UPDATE = UpdateParams("sft", {"aggregation": "token_mean"})
# With that eps a gradient that is nothing but rounding, as that of a key's bias can be, is no step of its own.
ADAM = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.3}


def batch(folder: Path) -> TableRef:
    rows = [
        sample(PROMPT, response)
        | {"sample_id": str(at), "kept": True}
        | {"advantages": [1.0] * len(response), "old_logprobs": [0.0] * len(response)}
        for at, response in enumerate(RESPONSES)
    ]
    return write_table(str(folder / "batch"), from_rows(rows, ROLLOUTS), ROLLOUTS)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    """Minus the mean log-probability of the response tokens."""
    logits = [model(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1] for response in RESPONSES]
    return cross_entropy(torch.cat(logits), torch.tensor([token for response in RESPONSES for token in response]))


def adamw(model: torch.nn.Module, optimizer: OptimizerSection) -> torch.optim.AdamW:
    """By torch, with weights of more than one dimension in one group and norms and biases in another."""
    betas, parameters = (optimizer.beta1, optimizer.beta2), list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": optimizer.weight_decay},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps)


@pytest.mark.parametrize(("clip_grad", "by_batch"), [(0.0, False), (0.1, False), (0.1, True)])
def test_two_steps_are_those_of_adamw_as_built_or_as_the_batch_says(
    tmp_path: Path, clip_grad: float, by_batch: bool
) -> None:
    optimizer = OptimizerSection.model_validate(
        {**ADAM, "clip_grad": clip_grad, "schedule": "cosine", "decay_steps": 3}
    )
    model = save_model("qwen2", tmp_path / "model")
    expected = adamw(model, optimizer)
    built = OptimizerSection(lr=1.0, clip_grad=5.0) if by_batch else optimizer
    update = replace(UPDATE, optimizer=optimizer.model_dump(mode="json")) if by_batch else UPDATE
    setup = TrainSetup(str(tmp_path / "model"), ModelSection(), built, PerfSection(train_threads=1), 1.0, 0)
    rank = MegatronRank(0, 1, setup)
    try:
        rank.connect(*rank.rendezvous())
        for step in range(2):
            found = rank.step(batch(tmp_path), update, f"{step}").metrics
            expected.zero_grad()
            loss = loss_of(model)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad or float("inf"))
            for group in expected.param_groups:
                group["lr"] = learning_rate(step, optimizer)
            expected.step()
            assert (found["loss"], found["grad_norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-4)
        rank.weights(str(tmp_path / "after"), 2)
    finally:
        rank.close()
    after, wanted = load_file(tmp_path / "after" / "model.safetensors"), dict(model.named_parameters())
    assert after.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(after[name], tensor.detach(), atol=1e-5, rtol=1e-4, msg=name)
