"""What the report draws: one figure a question, each a line per series over steps."""

from milepost.flows.curve import FigureData, Series
from milepost.flows.results import Evaluation
from milepost.flows.sql import as_rows, query
from milepost.flows.step_rows import learns_only
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder

# From the rollouts: how old the weights of a sample were, and how sure the policy was of what it drew.
_SAMPLED = """
select step, avg(step - weight_version_min) as staleness,
    -avg(list_avg(rollout_logprobs)) filter (len(rollout_logprobs) > 0) as surprise
from rollouts group by step order by step
"""
# From the optimizer's batches, of steps that did not measure it: how far trainer and rollout engine are apart.
_MISMATCH = """
select step, avg(abs(trainer - engine)) as apart
from (select step, unnest(old_logprobs) as trainer, unnest(rollout_logprobs) as engine from batches)
group by step order by step
"""


def _of_metric(steps: list[StepManifest], metric: str, name: str) -> Series:
    found = [(step.step, step.metrics[metric]) for step in steps if metric in step.metrics]
    return Series(name, [step for step, _ in found], [value for _, value in found])


def _of_counts(steps: list[StepManifest], name: str) -> Series:
    return Series(name, [step.step for step in steps], [float(step.accounting.get(name, 0)) for step in steps])


def _of_evaluations(found: list[Evaluation]) -> Series:
    return Series(
        "held-out accuracy, 95 % interval",
        [item.step for item in found],
        [item.mean for item in found],
        [item.low for item in found],
        [item.high for item in found],
    )


def _asked(folder: RunFolder, statement: str, names: list[str]) -> list[Series]:
    _, rows = as_rows(query([folder], statement))
    return [
        Series(name, [row[0] for row in rows if row[at] is not None], [row[at] for row in rows if row[at] is not None])
        for at, name in enumerate(names, start=1)
    ]


def figures(folder: RunFolder, steps: list[StepManifest], evaluations: list[Evaluation]) -> list[FigureData]:
    """Every figure that has something to show."""
    trained = any("train/optimizer_steps" in step.metrics for step in steps)
    learnt = [step for step in steps if learns_only(step)]
    staleness, surprise = _asked(folder, _SAMPLED, ["steps between weights and training", "surprise"])
    (mismatch,) = _asked(folder, _MISMATCH, ["trainer against engine"])
    measured = _of_metric(steps, "mismatch/logprob_abs_diff", "trainer against engine")
    classes = sorted({name for step in steps for name in step.accounting if name != "served"})
    stages = sorted({name for step in steps for name in step.metrics if name.startswith("time/")})
    drawn = [
        FigureData("mean reward", [_of_metric(steps, "rollout/reward", "reward")]),
        FigureData("loss", [_of_metric(learnt, "train/loss", "mean of a token")]),
        FigureData("accuracy", [_of_evaluations(evaluations)]),
        FigureData(
            "response length, tokens",
            [_of_metric(steps, f"rollout/response_len/{name}", name) for name in ("mean", "max")],
        ),
        FigureData("KL to the weights that sampled", [_of_metric(steps, "train/ppo_kl", "k1 estimate")]),
        FigureData("entropy, as mean surprise of sampled tokens", [surprise]),
        FigureData("gradient norm", [_of_metric(steps, "train/grad_norm", "before clipping")]),
        FigureData("clipped share of tokens", [_of_metric(steps, "train/pg_clipfrac", "clipped")]),
        FigureData("squared error of the critic", [_of_metric(steps, "train/value_loss", "value loss")]),
        FigureData(
            "how much of the returns the critic foretells",
            [_of_metric(steps, "train/explained_variance", "explained variance")],
        ),
        FigureData("log-probabilities apart, mean", [] if learnt else [measured if measured.values else mismatch]),
        FigureData(
            "engine's tokens by how much they count, as a share",
            [_of_metric(steps, "mismatch/ess", "effective sample size")],
        ),
        FigureData("staleness", [staleness] if trained else []),
        FigureData("seconds by stage", [_of_metric(steps, name, name.removeprefix("time/")) for name in stages]),
        FigureData("prompts by how they ended", [_of_counts(steps, name) for name in classes], named=True),
    ]
    return [figure for figure in drawn if any(series.values for series in figure.series)]
