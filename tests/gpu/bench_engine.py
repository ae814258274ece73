"""A real trainer and a real SGLang server on this machine's GPU: `python tests/gpu/bench_engine.py [--tiny]`.

Tokens a second asked directly and through router and rollout function, weight pushes by each transport with the
log-probabilities of both sides before and after, and memory given up and taken back. Writes bench_engine.json.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_table import tables
from made_model import SMOLLM2, random_model
from made_trainer import SIZES
from stored_runs import sglang_python

from milepost.engines.fleet import Fleet, fleet, joined_cluster
from milepost.engines.protocols import GenerateRequest, UpdateParams
from milepost.flows.engine_checks import check_transport
from milepost.flows.plan import model_folder
from milepost.flows.recipe import load_recipe
from milepost.router.client import HttpGenerate, open_client
from milepost.storage import runs
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table, with_columns, write_table
from milepost.tasks.generate import generate_table
from milepost.tasks.samples import Prompt
from milepost.tasks.sampling import Sampling, sampling_params
from milepost.tasks.sync import push_weights

TRANSPORTS = ("disk", "delta", "tensor", "distributed")
SIZE_SECONDS = 150.0  # that a size takes at least
PARTS = ("wake", "digest", "open", "gather", "begin", "send", "check", "transfer")  # as push_tensors measures them


def parameters(model: str, arguments: argparse.Namespace) -> Parameters:
    dtype = "float32" if arguments.tiny else "bfloat16"
    settings = [
        f"model.path={json.dumps(model)}",
        f"model.context_length={arguments.prompt_tokens + arguments.new_tokens + 8}",
        f"perf.dtype={dtype}",
        f"perf.colocate={json.dumps(not arguments.apart)}",
        "engines.rollout=sglang",
        "engines.max_running_requests=256",
        "engines.start_timeout_seconds=500",
        f"rollout.max_new_tokens={arguments.new_tokens}",
        "data.rollout_batch_size=64",
        "data.n_samples_per_prompt=1",
        "algorithm.num_steps_per_rollout=1",
        "sync.timeout_seconds=120",
        "optimizer.lr=1e-3",
        *([f"engines.sglang_python={sglang_python()}"] if arguments.tiny else []),
        *arguments.settings,
    ]
    return load_recipe(None, settings)[0]


def prompts(count: int, tokens: int, vocab: int) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [
        Prompt(f"p{row}", f"g{row}", "bench", "", random.integers(5, vocab, tokens).tolist(), None, {})
        for row in range(count)
    ]


async def direct(url: str, chosen: list[Prompt], params: dict[str, Any], concurrency: int) -> float:
    """Tokens a second of a plain load generator."""
    async with open_client(concurrency) as client:
        generate, gate = HttpGenerate(url, client, timeout_seconds=600), asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> int:
            async with gate:
                return len((await generate(GenerateRequest(prompt.group_id, prompt.token_ids, params))).output_ids)

        started = time.perf_counter()
        tokens = await asyncio.gather(*(one(prompt) for prompt in chosen))
        return sum(tokens) / (time.perf_counter() - started)


async def through_router(found: Fleet, chosen: list[Prompt], sampling: Sampling, settings: Parameters) -> Any:
    """The rollouts table, and tokens a second, through rollout function, router and engine."""
    started = time.perf_counter()
    place = {"run_id": "bench", "step": 0, "shard": 0}
    table = await generate_table(chosen, sampling, settings.rollout, router_url=found.router_url, place=place)
    tokens = sum(map(len, table["response_token_ids"].to_pylist()))
    return table, tokens / (time.perf_counter() - started)


def speeds(found: Fleet, settings: Parameters, arguments: argparse.Namespace, vocab: int) -> list[dict[str, Any]]:
    params = sampling_params(settings.rollout) | {"ignore_eos": True}
    url, rows = found.engines[0].url(), []
    for concurrency in (8, 16) if arguments.tiny else (64, 256):
        chosen = prompts(2 * concurrency, arguments.prompt_tokens, vocab)
        rollout = settings.rollout.model_copy(update={"concurrency": concurrency})
        sampling = Sampling("single_turn", params, 1, settings.model.context_length, 0)
        asyncio.run(direct(url, chosen[:concurrency], params, concurrency))  # warms up
        plain = asyncio.run(direct(url, chosen, params, concurrency))
        changed = settings.model_copy(update={"rollout": rollout})
        _, routed = asyncio.run(through_router(found, chosen, sampling, changed))
        rows.append({"requests": concurrency, "direct": plain, "routed": routed, "ratio": routed / plain})
        print(rows[-1], flush=True)
    return rows


def difference(found: Fleet, settings: Parameters, folder: Path, vocab: int) -> tuple[dict[str, float], TableRef]:
    """Of the engine's log-probabilities and the trainer's for the same tokens, and the table with both."""
    params = sampling_params(settings.rollout)
    sampling = Sampling("single_turn", params, 1, settings.model.context_length, 0)
    chosen = prompts(16, 32, vocab)
    table, _ = asyncio.run(through_router(found, chosen, sampling, settings))
    ref = write_table(str(folder / f"rollouts-{time.time_ns()}"), table, ROLLOUTS)
    assert found.trainer is not None
    both = found.trainer.logprobs(ref, "policy", str(folder / f"logprobs-{time.time_ns()}"))
    scored = read_table(both)
    engine = np.concatenate([np.array(row) for row in scored["rollout_logprobs"].to_pylist()])
    trainer = np.concatenate([np.array(row) for row in scored["old_logprobs"].to_pylist()])
    apart = np.abs(engine - trainer)
    return {"mean": float(apart.mean()), "max": float(apart.max()), "tokens": float(len(apart))}, both


def train_once(found: Fleet, scored: TableRef, folder: Path) -> None:
    """One optimizer step on what was generated, so that the next push has other weights to send."""
    table = read_table(scored)
    lengths = [len(row) for row in table["response_token_ids"].to_pylist()]
    advantages = [[1.0 if row % 2 else -1.0] * length for row, length in enumerate(lengths)]
    batch = with_columns(table, {"advantages": list(advantages), "kept": [True] * len(lengths)})
    key = str(time.time_ns())
    assert found.trainer is not None
    result = found.trainer.step(write_table(str(folder / key), batch, ROLLOUTS), UpdateParams("ppo_clip"), key)
    assert result.applied, result


def broken_down(metrics: dict[str, float]) -> str:
    """Where a push's time went, in milliseconds, and GB/s while engines took part, with and without the check."""
    seconds = {name: metrics.get(f"sync/{name}_seconds", 0.0) for name in PARTS}
    parts = " ".join(f"{name} {1e3 * taken:.1f}" for name, taken in seconds.items() if taken)
    rates = ""
    if seconds["transfer"]:
        gigabytes, loading = metrics["sync/bytes"] / 1e9, seconds["transfer"] - seconds["check"]
        rates = f", {gigabytes / seconds['transfer']:.1f} GB/s, {gigabytes / loading:.1f} GB/s without the check"
    return f"{parts} total {1e3 * metrics['sync/seconds']:.1f} ms{rates}"


def pushes(found: Fleet, settings: Parameters, folder: RunFolder, vocab: int, transports: list[str]) -> list[Any]:
    """Three pushes by each transport, after a step of the trainer, the second and third on what the first opened."""
    rows = []
    _, scored = difference(found, settings, Path(folder.uri), vocab)
    for number, transport in enumerate(transports):
        sync = settings.sync.model_copy(update={"transport": transport})
        taken: dict[str, Any] = {"transport": transport}
        try:
            if torch.cuda.is_available():
                check_transport(settings.model_copy(update={"sync": sync}))
            train_once(found, scored, Path(folder.uri))
            taken["before"], _ = difference(found, settings, Path(folder.uri), vocab)
            for attempt in range(3):
                pushed = asyncio.run(
                    push_weights(
                        3 * number + attempt,
                        sync,
                        folder=folder,
                        trainer=found.weights,
                        engines=list(found.engines),
                        router_url=found.router_url,
                    )
                )
                taken[f"push {attempt}"] = pushed.metrics
                print(f"{transport}, push {attempt}: {broken_down(pushed.metrics)}", flush=True)
            taken["after"], scored = difference(found, settings, Path(folder.uri), vocab)
        except Exception as error:  # the other transports are measured all the same
            taken["error"] = f"{type(error).__name__}: {error}"
        rows.append(taken)
        print(taken, flush=True)
    return rows


def memory(found: Fleet) -> dict[str, float]:
    """Seconds for the engine and the trainer to give their memory up and to take it back."""
    taken = {}
    for name, party in (("engine", found.engines[0]), ("trainer", found.trainer)):
        for verb in ("release_memory", "resume_memory"):
            started = time.perf_counter()
            getattr(party, verb)()
            taken[f"{name}.{verb}"] = time.perf_counter() - started
    return taken


def measure_size(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything of one size, on one server."""
    result: dict[str, Any] = {"size": size}
    with tempfile.TemporaryDirectory() as name:
        folder = runs.run_folder(name, "bench")
        model = model_folder(SMOLLM2) if size == "smollm2" else random_model(size, Path(name) / "model")
        vocab = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        settings = parameters(model, arguments)
        started = time.perf_counter()
        with fleet("bench", settings, model) as found:
            result["start_seconds"] = time.perf_counter() - started
            print(size, "started after", result["start_seconds"], flush=True)
            found.engines[0].resume_memory()
            result["speeds"] = speeds(found, settings, arguments, vocab)
            result["pushes"] = pushes(found, settings, folder, vocab, arguments.transports.split(","))
            result["memory"] = memory(found)
            print(result["memory"], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--sizes", default="0.6B", help="which of smollm2, " + ", ".join(SIZES))
    parser.add_argument("--apart", action="store_true", help="trainer and engine on a GPU each")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="for everything")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="section.field=value")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.sizes, arguments.prompt_tokens, arguments.new_tokens = "tiny", 16, 16
    results: list[dict[str, Any]] = []
    started = time.monotonic()
    with joined_cluster(None):
        for size in arguments.sizes.split(","):
            if results and time.monotonic() - started + SIZE_SECONDS > arguments.limit_seconds:
                print(f"no time is left for {size}", flush=True)
                break
            try:
                results.append(measure_size(size, arguments))
            except Exception as error:  # the other sizes are measured all the same
                results.append({"size": size, "error": f"{type(error).__name__}: {error}"})
                print(results[-1], flush=True)
            content = {"arguments": vars(arguments), "sizes": results}
            Path(arguments.out, "bench_engine.json").write_text(json.dumps(content, indent=1, default=str))
    print(tables(results), flush=True)
    sys.exit(any("error" in result for result in results))


if __name__ == "__main__":
    main()
