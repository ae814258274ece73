"""One stored sample as people read it: prompt, response token by token, verdict, and whose weights it was."""

import json
from math import exp
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from milepost.engines.tokenizer import token_texts
from milepost.flows.sql import committed
from milepost.storage import attempts, files, runs
from milepost.storage.journal import Slot, StepStore
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder

STAGES = ("optimize", "filter", "score", "generate")  # the last that has a sample knows the most of it

# From what the model was sure of to what surprised it, by the probability that it gave the token.
SHADES = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))


def find_sample(root: str, run: str, sample: str) -> dict[str, Any]:
    """Everything stored of a sample; LookupError names the nearest ids when the run has none of this one."""
    return stored_sample(runs.run_folder(root, run), sample)


def stored_sample(folder: RunFolder, sample: str) -> dict[str, Any]:
    """`find_sample` in the folder of a run."""
    record = attempts.current(folder)
    step = _step_of(sample)
    tables = {stage: _tables(folder, stage, step) for stage in STAGES}
    for stage in STAGES:
        for uri in tables[stage]:
            found = _read(uri, sample)
            if found:
                return found[0] | {"tokens": token_texts(record.model["folder"], found[0]["response_token_ids"])}
    known = [name for uri in tables["generate"] for name in _ids(uri)]
    hint = nearest(sample, known) or (f"; that step has {known[0]} to {known[-1]}" if known else "")
    raise LookupError(f"run {folder.run_id!r} has no sample {sample!r}{hint}")


def _tables(folder: RunFolder, stage: str, step: int | None) -> list[str]:
    """The tables of a stage in the step that a sample's id names; of all steps for an id from elsewhere."""
    if step is None:
        return [uri for _, uri in committed(folder).tables(stage)]
    commits = StepStore(folder.step(step), folder.run_id, step).commits()
    found = [commit for commit in commits if Slot.parse(commit.slot).stage == stage]
    return [ref.uri for commit in found for ref in commit.tables.values()]


def _step_of(sample: str) -> int | None:
    """The step that a sample's id begins with."""
    begin = sample.partition("-")[0]
    return int(begin) if begin.isdigit() else None


def _read(uri: str, sample: str) -> list[dict[str, Any]]:
    fs, path = files.filesystem(uri)
    found: list[dict[str, Any]] = pq.read_table(path, filters=[("sample_id", "=", sample)], filesystem=fs).to_pylist()
    return found


def _ids(uri: str) -> list[str]:
    fs, path = files.filesystem(uri)
    ids: list[str] = pq.read_table(path, columns=["sample_id"], filesystem=fs)["sample_id"].to_pylist()
    return ids


def show_sample(row: dict[str, Any]) -> None:
    """The sample on the terminal, in colours where it has them."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(row['sample_id'])}[/]  run {escape(row['run_id'])}, step {row['step']}")
    console.print(f"data set {escape(row['dataset'])}, label {escape(row['label'])}")
    for role, text in turns(row):
        console.print(f"\n[bold cyan]{escape(role)}[/]")
        console.print(Text(text))
    console.print(
        "\n[bold cyan]tokens[/], by probability:", *(f"[{style}]{at:g}[/]" for at, style in SHADES), "masked: dim"
    )
    console.print(token_strip(row))
    console.print(f"\n[bold cyan]verdict[/] {_verdict(row)}")
    versions = f"{row['weight_version_min']} to {row['weight_version_max']} ({row['weights_digest']})"
    console.print(f"weights {versions}; {row['status']}, finished by {row['finish_reason']}, seed {row['seed']}")
    if row["kept"] is not None:
        console.print("trained on" if row["kept"] else f"not trained on: {escape(row['drop_reason'] or '')}")


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The prompt's messages and the response, by who said them."""
    prompt = json.loads(row["prompt"])
    messages = prompt if isinstance(prompt, list) else [{"role": "prompt", "content": prompt}]
    said = [(str(message["role"]), _content(message.get("content"))) for message in messages]
    return [*said, ("response", row["response"])]


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def shade(logprob: float) -> int:
    """Which of `SHADES` a token with this log-probability has."""
    return next(place for place, (least, _) in enumerate(SHADES) if exp(logprob) >= least)


def token_strip(row: dict[str, Any]) -> Text:
    """The response in the colour of each token's probability; tokens that are not trained are dim."""
    strip = Text()
    for text, logprob, mask in zip(row["tokens"], row["rollout_logprobs"], row["loss_mask"], strict=True):
        strip.append(text, style=SHADES[shade(logprob)][1] if mask else "dim")
    return strip


def _verdict(row: dict[str, Any]) -> str:
    if row["verdict"] is None:
        return "not scored yet"
    said = json.loads(row["verdict"])
    parts = ", ".join(f"{name} {value:g}" for name, value in (row["rewards"] or []))
    score = "no score" if row["reward"] is None else f"score {row['reward']:g}"
    extracted = said.get("extracted")
    rest = [parts, said.get("reason"), extracted and f"extracted {extracted}", said.get("grader")]
    return "; ".join([score, *(escape(text) for text in rest if text)])
