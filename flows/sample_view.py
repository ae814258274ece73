"""One stored sample as people read it: prompt, response token by token, verdict, and whose weights it was."""

import json
from math import exp
from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from milepost.engines.tokenizer import prompt_texts, token_texts
from milepost.flows.sql import committed
from milepost.storage import attempts, manifest, purges, runs
from milepost.storage.conversation import CONVERSATION
from milepost.storage.journal import Slot, StepStore
from milepost.storage.messages import Messages
from milepost.storage.parent import PARENT
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.sft_rows import ASSISTANT
from milepost.storage.tables import TableRef, read_table
from milepost.storage.taught import row_of, taught
from milepost.storage.tombstones import TOMBSTONE_JSON

STAGES = ("optimize", "filter", "score", "generate")  # the last that has a sample knows the most of it

# From what the model was sure of to what surprised it, by the probability that it gave the token.
SHADES = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))


def find_sample(root: str, run: str, sample: str) -> dict[str, Any]:
    """Everything stored of a sample; LookupError names the nearest ids when the run has none of this one.

    `template_text` is its prompt as the model read it, where the chat template says more than the messages do.
    """
    folder = runs.run_folder(root, run)
    row = stored_sample(folder, sample)
    ids = [] if row["purged"] else row["prompt_token_ids"]
    whole, plain = prompt_texts(attempts.current(folder).model["folder"], ids)
    return row | {"template_text": whole if says_more(plain, _asked(row)) else ""}


def says_more(text: str, messages: Messages) -> bool:
    """Whether a rendered prompt has words that are in no message, such as definitions of tools or a system prompt."""
    said = [_content(message.get("content")).strip() for message in messages]
    for words in sorted(said, key=len, reverse=True) + [str(message["role"]) for message in messages] + [ASSISTANT]:
        text = text.replace(words, "", 1) if words else text
    return any(letter.isalnum() for letter in text)


def stored_sample(folder: RunFolder, sample: str) -> dict[str, Any]:
    """`find_sample` in the folder of a run."""
    record = attempts.current(folder)
    is_own = not {"origin", PARENT} & record.data.keys()  # other ids are anything, or name the step of another run
    step = _step_of(sample) if is_own else None
    for stage in STAGES:
        for ref in _tables(folder, stage, step):
            table = read_table(ref)
            found = table.filter(pc.equal(table["sample_id"], sample)).to_pylist()
            if found:
                return found[0] | _told(folder, record, found[0])
    raise LookupError(f"run {folder.run_id!r} has no sample {sample!r}{_instead(folder, sample, step)}")


def _told(folder: RunFolder, record: RunRecord, row: dict[str, Any]) -> dict[str, Any]:
    """The text of each token, the day of the purge that left none, and the row that a fine-tuning has it from."""
    found = {"purged": "", "learnt_from": "", **_learnt(record, row)}
    if row["prompt"] == TOMBSTONE_JSON:
        day = purges.purged_prompts(folder.uri).get(row["prompt_id"], "")
        return found | {"tokens": [""] * len(row["response_token_ids"]), "purged": day}
    return found | {"tokens": token_texts(record.model["folder"], row["response_token_ids"])}


def _learnt(record: RunRecord, row: dict[str, Any]) -> dict[str, Any]:
    """What nobody has sampled has no log-probabilities: the zeros in their place were never read."""
    learns = taught(record)
    if learns is None:
        return {}
    number = row_of(row["metadata"])
    place = learns.file if number is None else f"row {number} of {learns.file}"
    return {"learnt_from": place, "rollout_logprobs": None}


def _instead(folder: RunFolder, sample: str, step: int | None) -> str:
    """Which sample may have been meant by an id that there is none of."""
    tables = _tables(folder, "generate", step) or _tables(folder, "optimize", step)
    known = [name for ref in tables for name in read_table(ref)["sample_id"].to_pylist()]
    if known:
        among = "the run" if step is None else "that step"
        return nearest(sample, known) or f"; {among} has {known[0]} to {known[-1]}"
    finished = manifest.finished_steps(folder)
    return f"; it has steps {finished[0]} to {finished[-1]}" if finished else "; it has finished no step yet"


def _tables(folder: RunFolder, stage: str, step: int | None) -> list[TableRef]:
    """The tables of a stage in the step that a sample's id names; of all steps for an id from elsewhere."""
    if step is None:
        return [ref for _, ref in committed(folder).tables(stage)]
    commits = StepStore(folder.step(step), folder.run_id, step).commits()
    found = [commit for commit in commits if Slot.parse(commit.slot).stage == stage]
    return [ref for commit in found for ref in commit.tables.values()]


def _step_of(sample: str) -> int | None:
    """The step that a sample's id begins with."""
    begin = sample.partition("-")[0]
    return int(begin) if begin.isdigit() else None


def show_sample(row: dict[str, Any]) -> None:
    """The sample on the terminal, in colours where it has them."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(row['sample_id'])}[/]  run {escape(row['run_id'])}, step {row['step']}")
    source = row["learnt_from"] or f"data set {row['dataset']}, label {row['label']}"
    console.print(escape(source))
    if row["purged"]:
        console.print(f"purged on {row['purged']}: what it said is gone, its {len(row['tokens'])} tokens are zeros")
    for role, text in turns(row):
        console.print(f"\n[bold cyan]{escape(role)}[/]")
        console.print(Text(text))
    if row["template_text"]:
        console.print("\n[bold cyan]prompt, as the chat template shows it to the model[/]")
        console.print(Text(row["template_text"]))
    shades = " ".join(f"[{style}]{at:g}[/]" for at, style in SHADES)
    console.print("\n[bold cyan]tokens[/]", "" if row["learnt_from"] else f"by probability: {shades}", "masked: dim")
    console.print(token_strip(row))
    if not row["learnt_from"]:
        _show_judgement(console, row)


def _show_judgement(console: Console, row: dict[str, Any]) -> None:
    """What a sample was worth, whose it is, and what became of it."""
    console.print(f"\n[bold cyan]verdict[/] {_verdict(row)}")
    versions = f"{row['weight_version_min']} to {row['weight_version_max']} ({row['weights_digest']})"
    weights = "not known" if row["weights_digest"] is None else versions
    ended = row["status"] if row["finish_reason"] is None else f"{row['status']}, finished by {row['finish_reason']}"
    console.print(f"weights {weights}; {ended}, seed {'not known' if row['seed'] is None else row['seed']}")
    if row["kept"] is not None:
        chosen = "kept" if row["advantages"] is None else "trained on"
        console.print(chosen if row["kept"] else f"not trained on: {escape(row['drop_reason'] or '')}")


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The prompt's messages, and the response or the turns of a conversation, by who said them."""
    said = [(str(message["role"]), _content(message.get("content"))) for message in _asked(row)]
    talk = json.loads(row["metadata"]).get(CONVERSATION)
    if not talk:
        return [*said, ("response", row["response"])]
    return [*said, *((_speaker(message), message["content"]) for message in talk)]


def _asked(row: dict[str, Any]) -> Messages:
    prompt = json.loads(row["prompt"])
    return prompt if isinstance(prompt, list) else [{"role": "prompt", "content": prompt}]


def _speaker(message: dict[str, Any]) -> str:
    name = message.get("name")
    return f"{message['role']} {name}" if name else str(message["role"])


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def logprobs_of(row: dict[str, Any]) -> list[float | None]:
    """The log-probability of each token; None where a sample that was made elsewhere came without."""
    return row["rollout_logprobs"] or [None] * len(row["response_token_ids"])


def shade(logprob: float) -> int:
    """Which of `SHADES` a token with this log-probability has."""
    return next(place for place, (least, _) in enumerate(SHADES) if exp(logprob) >= least)


def token_strip(row: dict[str, Any]) -> Text:
    """The response in the colour of each token's probability; tokens that are not trained are dim."""
    strip = Text()
    for text, logprob, mask in zip(row["tokens"], logprobs_of(row), row["loss_mask"], strict=True):
        known = "" if logprob is None else SHADES[shade(logprob)][1]
        strip.append(text, style=known if mask else "dim")
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
