"""From rewards to advantages: a value per sample or, with a penalty on tokens or a discount, a value per token.

A sample without a finite reward, or one that a filter did not keep, gets 0.0 and leaves its group's statistics.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from milepost.storage.registry import check_arity, nearest, resolve
from milepost.tasks.token_returns import gae_advantages, penalties, returns, whitened

GROUP = "milepost.advantages"
STD_EPS = 1e-6

Advantage = Callable[[pa.Table, Mapping[str, Any]], list[list[float]]]
GroupAdvantage = Callable[..., list[float]]


def grpo(rewards: list[float], *, normalize_std: bool = True, eps: float = STD_EPS) -> list[float]:
    """Reward minus the group's mean, over its unbiased standard deviation plus `eps` (arXiv:2402.03300)."""
    if max(rewards) == min(rewards):  # the mean of equal floats may differ from them
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + eps) for value in centred]


def dr_grpo(rewards: list[float], **_: Any) -> list[float]:
    """Reward minus the group's mean, never divided (arXiv:2503.20783)."""
    return grpo(rewards, normalize_std=False)


def rloo(rewards: list[float], **_: Any) -> list[float]:
    """Reward minus the mean of the group's other rewards (arXiv:2402.14740)."""
    others = len(rewards) - 1
    return [value * len(rewards) / others for value in dr_grpo(rewards)] if others else [0.0]


def reinforce(rewards: list[float], **_: Any) -> list[float]:
    """The reward itself, without a baseline; the only estimator that is not zero for a group without spread."""
    return rewards


def _by_group(estimator: GroupAdvantage) -> Advantage:
    """An advantage over a table from one over the finite rewards of a group."""

    def advantage(rollouts: pa.Table, params: Mapping[str, Any]) -> list[list[float]]:
        _check_params(params, ["normalize_std", "eps"])
        scored: dict[str, list[tuple[int, float]]] = {}
        for row, (group, reward) in enumerate(zip(rollouts["group_id"].to_pylist(), _rewards(rollouts), strict=True)):
            if reward is not None:
                scored.setdefault(group, []).append((row, reward))
        values = [0.0] * rollouts.num_rows
        for members in scored.values():
            for (row, _), value in zip(members, estimator([reward for _, reward in members], **params), strict=True):
                values[row] = value
        return [[value] * tokens for value, tokens in zip(values, _response_lengths(rollouts), strict=True)]

    return advantage


def reinforce_plus_plus(rollouts: pa.Table, params: Mapping[str, Any]) -> list[list[float]]:
    """Discounted returns of each token, which is charged for its divergence from the reference (arXiv:2501.03262)."""
    _check_params(params, ["gamma", "kl_coef", "kl_estimator"])
    charged, masks = _charged(rollouts, params), rollouts["loss_mask"].to_pylist()
    return [
        [0.0] * len(mask) if reward is None else returns(reward, charges, mask, gamma=params.get("gamma", 1.0))
        for reward, charges, mask in zip(_rewards(rollouts), charged, masks, strict=True)
    ]


def reinforce_plus_plus_baseline(rollouts: pa.Table, params: Mapping[str, Any]) -> list[list[float]]:
    """Reward minus the group's mean, and what the token itself is charged; nothing is discounted (arXiv:2501.03262)."""
    _check_params(params, ["gamma", "kl_coef", "kl_estimator"])
    centred, charged = _by_group(dr_grpo)(rollouts, {}), _charged(rollouts, params)
    return [
        row if reward is None else [value - float(charge) for value, charge in zip(row, charges, strict=True)]
        for row, charges, reward in zip(centred, charged, _rewards(rollouts), strict=True)
    ]


def gae(rollouts: pa.Table, params: Mapping[str, Any]) -> list[list[float]]:
    """What follows each token beyond what the critic expected, as far ahead as `gae_lambda` looks (arXiv:1506.02438).

    A token that is not trained is no step of the way: it has no advantage, and is passed over.
    """
    _check_params(params, ["gamma", "gae_lambda", "kl_coef", "kl_estimator"])
    if "values" not in rollouts.column_names or rollouts["values"].null_count:
        raise ValueError("advantage 'gae' needs what a critic expects, and samples have no values: fill the column")
    masks, values = rollouts["loss_mask"].to_pylist(), rollouts["values"].to_pylist()
    if not all(math.isfinite(value) for row in values for value in row):
        raise ValueError("the critic expects a return that is not finite: lower critic.lr, and go back to a checkpoint")
    charged, gamma, decay = _charged(rollouts, params), params.get("gamma", 1.0), params.get("gae_lambda", 1.0)
    return [
        [0.0] * len(mask)
        if reward is None
        else gae_advantages(reward, charges, expected, mask, gamma=gamma, gae_lambda=decay)
        for reward, charges, expected, mask in zip(_rewards(rollouts), charged, values, masks, strict=True)
    ]


def _charged(rollouts: pa.Table, params: Mapping[str, Any]) -> list[Any]:
    """What each token is charged for its divergence from the reference."""
    coefficient, estimator = params.get("kl_coef", 0.0), params.get("kl_estimator", "low_var")
    return penalties(rollouts, kl_coef=coefficient, kl_estimator=estimator)


ADVANTAGES: dict[str, Advantage] = {
    "grpo": _by_group(grpo),
    "gspo": _by_group(grpo),
    "dr_grpo": _by_group(dr_grpo),
    "rloo": _by_group(rloo),
    "reinforce": _by_group(reinforce),
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}

NORMALISED = ("grpo", "gspo")  # by the group's deviation
BASELINES = (*NORMALISED, "dr_grpo", "rloo", "reinforce_plus_plus_baseline")  # zero for a group of one
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")  # always
PER_TOKEN = (*WHITENED, "gae")  # have a reward for each token
DISCOUNTED = ("reinforce_plus_plus", "gae")


def get_advantage(name: str) -> Advantage:
    """The estimator called `name`: a callable `(rollouts, params) -> one list of per-token values per row`."""
    advantage: Advantage = resolve(name, ADVANTAGES, group=GROUP)
    check_arity(advantage, 2, name=name, group=GROUP)
    return advantage


def advantage_columns(rollouts: pa.Table, name: str, *, whiten: bool = False, **params: Any) -> list[list[float]]:
    """Per-token advantages in table order, each row as long as its response; ValueError when an estimator differs.

    With `whiten`, and always for the estimators of WHITENED, they are whitened over the trained tokens of the table.
    """
    return finished_columns(rollouts, name, raw_columns(rollouts, name, **params), whiten=whiten)


def finished_columns(
    rollouts: pa.Table, name: str, columns: list[list[float]], *, whiten: bool = False
) -> list[list[float]]:
    """What the estimator has said, whitened where that is asked for or always done."""
    return whitened(columns, _trained(rollouts)) if whiten or name in WHITENED else columns


def raw_columns(rollouts: pa.Table, name: str, **params: Any) -> list[list[float]]:
    """What the estimator says, before any whitening; see advantage_columns."""
    columns = [[float(value) for value in row] for row in get_advantage(name)(rollouts, params)]
    found, wanted = [len(row) for row in columns], _response_lengths(rollouts)
    if found != wanted:
        raise ValueError(f"advantage {name!r} returned rows of {found} tokens, the responses have {wanted}")
    for row, values in enumerate(columns):
        if not all(map(math.isfinite, values)):
            raise ValueError(f"advantage {name!r} is not finite in row {row}: return 0.0 where there is no advantage")
    return columns


def compute(name: str, rewards: list[list[float | None]], **params: Any) -> list[list[float]]:
    """A value per sample, groups in and groups out; None, NaN and infinity mark a sample that could not be scored."""
    rows = [(str(index), reward) for index, group in enumerate(rewards) for reward in group]
    table = pa.table(
        {
            "group_id": pa.array([group for group, _ in rows], pa.string()),
            "sample_id": pa.array([str(row) for row in range(len(rows))], pa.string()),
            "reward": pa.array([_number(reward) for _, reward in rows], pa.float64()),
            "response_token_ids": pa.array([[0]] * len(rows), pa.list_(pa.int32())),
            "loss_mask": pa.array([[1]] * len(rows), pa.list_(pa.uint8())),
        }
    )
    values = (row[0] for row in advantage_columns(table, name, **params))
    return [[next(values) for _ in group] for group in rewards]


def _number(reward: object) -> float | None:
    if reward is None or isinstance(reward, numbers.Real):
        return None if reward is None else float(reward)
    raise ValueError(f"a reward is {reward!r}, it must be a number, or None when the sample could not be scored")


def _rewards(rollouts: pa.Table) -> list[float | None]:
    rewards = rollouts["reward"].to_pylist()
    kept = rollouts["kept"].to_pylist() if "kept" in rollouts.column_names else [None] * len(rewards)
    return [
        None if reward is None or not math.isfinite(reward) or keep is False else reward
        for reward, keep in zip(rewards, kept, strict=True)
    ]


def _trained(rollouts: pa.Table) -> list[list[int]]:
    """The loss mask of each row, and nothing trained in one that has no part in the step."""
    masks = rollouts["loss_mask"].to_pylist()
    return [[0] * len(mask) if reward is None else mask for mask, reward in zip(masks, _rewards(rollouts), strict=True)]


def _response_lengths(rollouts: pa.Table) -> list[int]:
    return [len(row) for row in rollouts["response_token_ids"]]


def _check_params(params: Mapping[str, Any], known: list[str]) -> None:
    for name in params:
        if name not in known:
            raise ValueError(f"unknown advantage parameter {name!r}{nearest(name, known)} known: {known}")
