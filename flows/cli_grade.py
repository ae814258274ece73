"""`milepost grade`: what a reward says of one response, or of each row of a file, without a run."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.flows.cli_options import AsJson, print_rows, print_values
from milepost.tasks.verdict import Verdict

SHOWN_ROWS = 50
CHUNK_ROWS = 256

grade_app = typer.Typer()


@grade_app.command()
def grade(
    reward: Annotated[str, typer.Argument(help="Reward: a built-in, an entry point, or pkg.mod:fn.")],
    response: Annotated[str | None, typer.Option(help="Response to grade, or @file.")] = None,
    label: Annotated[str, typer.Option(help="Label, as JSON or plain text.")] = "null",
    prompt: Annotated[str, typer.Option(help="Prompt, as JSON or plain text.")] = "",
    metadata: Annotated[str, typer.Option(help="The prompt's metadata, as a JSON object.")] = "{}",
    jsonl: Annotated[
        str | None, typer.Option(help="File of rows with response, and label, prompt, metadata, group_id where needed.")
    ] = None,
    options: Annotated[str, typer.Option(help="The reward's options, as a JSON object.")] = "{}",
    timeout: Annotated[float, typer.Option(help="Seconds that one sample may take.")] = 10.0,
    network: Annotated[bool, typer.Option("--network", help="Let the reward use the network.")] = False,
    workers: Annotated[int | None, typer.Option(help="Grader processes for a file (default: one a core).")] = None,
    as_json: AsJson = False,
) -> None:
    """Grade one response, or each row of a JSONL file, and print the verdicts."""
    if (response is None) == (jsonl is None):
        raise ValueError("give either --response, for one, or --jsonl, for the rows of a file")
    if timeout <= 0:
        raise ValueError(f"--timeout {timeout:g} must be above 0")
    given = _object(options, "--options")
    if jsonl is not None:
        _grade_file(reward, jsonl, given, timeout_seconds=timeout, network=network, workers=workers, as_json=as_json)
        return
    from milepost.flows.recipe import json_or_text
    from milepost.tasks.rewards import grade as grade_response

    sample = {"prompt": json_or_text(prompt), "metadata": _object(metadata, "--metadata")}
    settings = {"timeout_seconds": timeout, "network": network}
    verdict = asdict(grade_response(reward, _text(response or ""), json_or_text(label), **sample, **settings, **given))
    if as_json:
        print(json.dumps(verdict))
    else:
        print_values(verdict, "verdict")


def _object(text: str, option: str) -> dict[str, Any]:
    """What an option holds, with the values of variables in place of `env:NAME`."""
    from milepost.storage.redaction import resolved

    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'{option} {text!r} must be a JSON object, such as \'{{"pattern": "[0-9]+"}}\'')
    return dict(resolved(found))


def _text(response: str) -> str:
    if not response.startswith("@"):
        return response
    try:
        return Path(response[1:]).read_bytes().decode()
    except OSError as error:
        raise ValueError(
            f"--response {response}: {error.strerror}; give a file that can be read, or the text"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--response {response} is not UTF-8 at byte {error.start}: convert it") from None


def _grade_file(
    reward: str,
    path: str,
    options: Mapping[str, Any],
    *,
    timeout_seconds: float,
    network: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    import asyncio

    from milepost.engines.local_graders import LocalGraders
    from milepost.flows.progress import progress_bar
    from milepost.tasks.grading import grade_rows, require_choice
    from milepost.tasks.reward_choice import single

    rows, choice = _rows(path), single(reward, options, network=network)
    verdicts: list[Verdict] = []

    async def work() -> None:
        await require_choice(graders, choice)
        for chunk in _chunks(rows):
            for verdict in await grade_rows(graders, choice, chunk, timeout_seconds=timeout_seconds):
                advance("null" if verdict.score is None else f"score {verdict.score:g}")
                if as_json:
                    print(json.dumps({"row": len(verdicts)} | asdict(verdict)))
                verdicts.append(verdict)

    with LocalGraders(workers=workers) as graders, progress_bar(f"grade {reward}", len(rows)) as advance:
        asyncio.run(work())
    if not as_json:
        _show(verdicts)


def _rows(path: str) -> list[dict[str, Any]]:
    from milepost.storage.prompt_source import BadLine, read_rows

    found = []
    for row in read_rows(path):
        reason = row.reason if isinstance(row, BadLine) else _wrong(row.value)
        if reason:
            raise ValueError(f"{path} line {row.line}: {reason}")
        assert not isinstance(row, BadLine)
        found.append(row.value)
    return found


def _wrong(row: Mapping[str, Any]) -> str:
    if not isinstance(row.get("response"), str):
        return f"'response' is {row.get('response')!r}, it must be text; keys found: {sorted(row)}"
    if not isinstance(row.get("metadata") or {}, dict):
        return f"'metadata' is {row['metadata']!r}, it must be an object"
    return ""


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Some hundred rows at a time, with neighbours of one group together."""
    chunk: list[dict[str, Any]] = []
    for row in rows:
        same = chunk and row.get("group_id") is not None and row.get("group_id") == chunk[-1].get("group_id")
        if len(chunk) >= CHUNK_ROWS and not same:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk


def _show(verdicts: Sequence[Verdict]) -> None:
    shown = [
        (at, "" if said.score is None else said.score, said.reason, _short(said.extracted or ""), said.seconds)
        for at, said in enumerate(verdicts[:SHOWN_ROWS])
    ]
    print_rows(("row", "score", "reason", "extracted", "seconds"), shown)
    if len(verdicts) > SHOWN_ROWS:
        print(f"and {len(verdicts) - SHOWN_ROWS} more rows; --json has them all")
    scores = [said.score for said in verdicts if said.score is not None]
    mean = f"{sum(scores) / len(scores):.4f}" if scores else "none"
    reasons = Counter(said.reason.partition(":")[0] for said in verdicts if said.score is None)
    print_values(
        {"rows": len(verdicts), "mean score": mean, "null": len(verdicts) - len(scores), **reasons}, "verdicts"
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
