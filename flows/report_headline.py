"""What there is to say of a run in a few lines."""

from collections.abc import Iterator

from milepost.flows.best import best_line
from milepost.flows.results import evaluations, finished
from milepost.storage import attempts, stops
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder

# Metric, its name for people, and how its value is written.
METRICS = (
    ("rollout/reward", "mean reward", ".3f"),
    ("rollout/response_len/mean", "response length", ".1f"),
    ("train/ppo_kl", "KL to the weights that sampled", ".2g"),
    ("train/grad_norm", "gradient norm", ".3g"),
    ("mismatch/logprob_abs_diff", "log-probabilities of trainer and engine apart", ".2g"),
)


def headline(folder: RunFolder) -> list[tuple[str, str]]:
    """Names and values, as text: of each number the first and the newest."""
    record, steps, evaluated = attempts.current(folder), finished(folder), evaluations(folder)
    rows = [("steps", f"{len(steps)} of {record.steps}"), ("model", record.parameters.model.path)]
    rows.append(("commit", record.provenance.commit[:12] or "unknown"))
    for item in dict.fromkeys(evaluated[:1] + evaluated[-1:]):
        rows.append((f"accuracy after step {item.step}", f"{item.mean:.3f} ({item.low:.3f} to {item.high:.3f})"))
    rows += _metrics(steps)
    if steps:
        tokens = sum(step.metrics.get("rollout/tokens", 0.0) for step in steps)
        rows.append(("tokens generated", f"{tokens:,.0f}"))
        rows.append(
            ("newest checkpoint", next((step.checkpoint for step in reversed(steps) if step.checkpoint), "none"))
        )
    rows += [(f"{name} checkpoint", text) for name, text in best_line(folder, record.parameters.checkpoint).items()]
    rows += [
        (f"stopped after {stop.after} of {record.steps} steps", f"{stop.reason} ({stop.rule})")
        for stop in stops.stops(folder)
    ]
    return rows


def _metrics(steps: list[StepManifest]) -> Iterator[tuple[str, str]]:
    for metric, name, form in METRICS:
        values = [step.metrics[metric] for step in steps if metric in step.metrics]
        if values:
            ends = dict.fromkeys((f"{values[0]:{form}}", f"{values[-1]:{form}}"))
            yield name, " → ".join(ends)
