"""Tokens a second of the embedded engine over HTTP, against one batched `transformers.generate` of the same requests.

Run as `python tests/bench/bench_embedded.py`; the best of several runs of each is compared.
"""

import asyncio
import random
import tempfile
import time
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from milepost.engines import cluster
from milepost.engines.rollout_actor import start_rollout_engine
from milepost.engines.served_engine import EmbeddedEngine
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import write_character_tokenizer

REQUESTS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY, RUNS, THREADS = 64, 16, 32, 64, 8, 1
CHARACTERS = "".join(map(chr, range(32, 32 + VOCABULARY - 3)))


def prompts() -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]


async def embedded_seconds(session: aiohttp.ClientSession) -> float:
    sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    bodies = [{"input_ids": ids, "sampling_params": sampling, "return_logprob": True} for ids in prompts()]

    async def complete(body: dict[str, Any]) -> int:
        async with session.post("/generate", json=body) as response:
            return len((await response.json())["output_ids"])

    start = time.perf_counter()
    counts = await asyncio.gather(*map(complete, bodies))
    seconds = time.perf_counter() - start
    assert counts == [NEW_TOKENS] * REQUESTS
    return seconds


def generate_seconds(model: Any) -> float:
    ids = torch.tensor(prompts())
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    assert output.shape == (REQUESTS, PROMPT_TOKENS + NEW_TOKENS)
    return seconds


async def compare(url: str, model_dir: str) -> tuple[float, float]:
    """The best times of both, taken in turns so that what else the machine does falls on both."""
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    embedded, plain = [], []
    # The pool of httpx takes milliseconds a request with so many connections, which would be measured instead.
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=REQUESTS)) as session:
        await embedded_seconds(session)
        generate_seconds(model)
        for _ in range(RUNS):
            embedded.append(await embedded_seconds(session))
            plain.append(generate_seconds(model))
    return min(embedded), min(plain)


def main() -> None:
    cluster.connect(num_cpus=2)
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(directory, vocab_size=VOCABULARY, hidden=128, layers=4, heads=4, kv_heads=2, seed=0)
        write_character_tokenizer(directory, CHARACTERS)
        engine = start_rollout_engine(
            "bench", 0, engine_class=EmbeddedEngine, timeout_seconds=120, model_dir=directory, threads=THREADS
        )
        embedded, plain = asyncio.run(compare(engine.url(), directory))
        engine.close()
    tokens = REQUESTS * NEW_TOKENS
    print(f"embedded engine over HTTP: {tokens / embedded:,.0f} tokens/s")
    print(f"one batched generate:      {tokens / plain:,.0f} tokens/s")
    print(f"ratio:                     {plain / embedded:.2f} (wanted: at least 0.5)")
    cluster.disconnect()


if __name__ == "__main__":
    main()
