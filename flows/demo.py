"""The demo: a tiny model is warmed up on solved arithmetic, then trained by GRPO through the whole DAG."""

import asyncio
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from milepost.engines.fleet import joined_cluster
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.flows.curve import terminal_curve
from milepost.flows.data import Problem, arithmetic_problems, write_prompts
from milepost.flows.fine_tune import Example, SftPlan, fine_tune
from milepost.flows.launch import orderly_end
from milepost.flows.progress import progress_bar, say
from milepost.flows.recipe import absolute_root, load_recipe
from milepost.flows.results import Evaluation, curve, evaluations, finished
from milepost.flows.services import prefect_api, running
from milepost.flows.train import train
from milepost.storage import runs
from milepost.storage.parameters import ModelSection, Parameters
from milepost.storage.training import OptimizerSection, PerfSection

CHARACTERS = "0123456789+="
TRAIN_PROBLEMS = 6000
HELD_OUT_PROBLEMS = 500
WARM_UP_STEPS = 500  # at most: it stops at WARM_UP_LOSS, where about half of the problems are solved
WARM_UP_BATCH = 128
WARM_UP_LOSS = 0.5
WARM_UP_LR = 3e-3


@dataclass(frozen=True)
class DemoFiles:
    """What the demo makes before it trains."""

    folder: Path
    random_model: Path
    train_prompts: Path
    held_out_prompts: Path
    problems: list[Problem]


@dataclass(frozen=True)
class DemoResult:
    """The run, its reward curve, and held-out greedy accuracy before and after GRPO."""

    run: str
    root: str
    rewards: list[float]
    before: Evaluation
    after: Evaluation
    report: str

    def summary(self) -> dict[str, Any]:
        return asdict(self) | {"gain": round(self.after.mean - self.before.mean, 4)}


def prepare(folder: Path, seed: int) -> DemoFiles:
    """Write the random model with its tokenizer, and the two prompt sets, which share no problem."""
    model = folder / "random"
    write_character_tokenizer(str(model), CHARACTERS)
    vocabulary = load_tokenizer(str(model)).vocab_size
    write_tiny_model(
        str(model), vocab_size=vocabulary, hidden=128, layers=4, heads=4, kv_heads=2, seed=seed, family="qwen3"
    )
    problems, held_out = arithmetic_problems(TRAIN_PROBLEMS, seed, held_out=HELD_OUT_PROBLEMS, operators="+")
    made = DemoFiles(folder, model, folder / "train.jsonl", folder / "held-out.jsonl", problems)
    for part, path in ((problems, made.train_prompts), (held_out, made.held_out_prompts)):
        write_prompts([{"prompt": item.prompt, "label": item.label, "metadata": {}} for item in part], str(path))
    return made


def examples(made: DemoFiles) -> list[Example]:
    """The solved problems as tokens, each response ended by the model's end token."""
    tokenizer = load_tokenizer(str(made.random_model))
    end = [min(tokenizer.eos_ids)]
    return [
        Example(item.prompt, tokenizer.encode(item.prompt), item.solution, tokenizer.encode(item.solution) + end)
        for item in made.problems
    ]


def warm_up(run: str, made: DemoFiles, *, seed: int) -> str:
    """Supervised fine-tuning until the model solves some problems; returns the folder of the warmed-up one."""
    plan = SftPlan(WARM_UP_STEPS, WARM_UP_BATCH, seed, target_loss=WARM_UP_LOSS)
    parameters = Parameters(
        model=ModelSection(context_length=16),
        optimizer=OptimizerSection(lr=WARM_UP_LR, warmup_steps=20),
        perf=PerfSection(max_tokens_per_micro_batch=16384, train_threads=2),
    )
    with progress_bar("warm-up", plan.steps) as advance:
        tuning = fine_tune(
            f"{run}-warm-up",
            str(made.folder),
            examples(made),
            plan,
            parameters=parameters,
            model_dir=str(made.random_model),
            advance=advance,
        )
        return asyncio.run(tuning).source.uri


def demo_parameters(made: DemoFiles, model_dir: str, *, seed: int) -> tuple[Parameters, int]:
    """The demo recipe with its model and data filled in, and the steps it asks for."""
    overrides = {
        "model.path": model_dir,
        "data.path": str(made.train_prompts),
        "data.seed": seed,
        "eval.path": str(made.held_out_prompts),
    }
    parameters, values = load_recipe("demo", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    return parameters, int(values["steps"])


def run_demo(root: str, *, seed: int, steps: int | None = None) -> DemoResult:
    """Warm up, train and evaluate; everything that was started has ended when this returns."""
    root = absolute_root(root)
    run = f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    made = prepare(Path(root, f"{run}-warm-up"), seed)
    services = prefect_api(say=say, console_level="CRITICAL")
    with orderly_end(), services, joined_cluster(running().ray_address):
        model_dir = warm_up(run, made, seed=seed)
        parameters, planned = demo_parameters(made, model_dir, seed=seed)
        sections = {name: getattr(parameters, name) for name in Parameters.model_fields}
        asyncio.run(train(run=run, root=root, steps=steps or planned, **sections))
    return result_of(run, root)


def result_of(run: str, root: str) -> DemoResult:
    folder = runs.run_folder(root, run)
    found = evaluations(folder)
    rewards = curve(finished(folder), "rollout/reward")
    return DemoResult(run, root, rewards, before=found[0], after=found[-1], report=folder.report)


def show(result: DemoResult) -> None:
    """The curve, the accuracies, and where to look next."""
    statement = "select step, avg(reward), count(*) from rollouts group by step order by step"
    print(terminal_curve(result.rewards, "mean reward of the samples of each step"))
    print("held-out greedy accuracy (95 % interval)")
    for name, item in (("after warm-up", result.before), ("after GRPO", result.after)):
        print(f"  {name:14} {item.mean:.3f}  ({item.low:.3f} to {item.high:.3f}, {item.count} problems)")
    print("\nwhere to look next")
    print(f"  report      {result.report}")
    print(f"  Prefect UI  milepost up --root {result.root}   then http://127.0.0.1:4200: the DAG of every step")
    print("  MLflow UI   the same command, then http://127.0.0.1:5000: metrics, tables, checkpoints")
    print(f'  rollouts    milepost sql {result.run} --root {result.root} "{statement}"')
