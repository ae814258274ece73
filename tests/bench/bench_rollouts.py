"""How many of the generated tokens are trained on, for responses of a long tail and a filter that drops groups.

An engine of this process generates for SECONDS_A_TOKEN a token, as many samples as one likes side by side. Half of the
responses have up to 40 tokens, one of a hundred has more than 1,000. Each step collects 16 groups of 8.

python tests/bench/bench_rollouts.py [STEPS]
"""

import asyncio
import hashlib
import itertools
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milepost.engines.grader_process import Answer
from milepost.engines.protocols import Completion, GenerateRequest, WeightVersion
from milepost.router.client import GenerationStopped
from milepost.storage.parameters import FilterSection, RewardSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, write_table
from milepost.tasks.asking import Asking
from milepost.tasks.carried import Carried, earlier_samples
from milepost.tasks.early_stop import EarlyStop
from milepost.tasks.filters import filter_table
from milepost.tasks.generate import Collection, generate_rows
from milepost.tasks.grading import verdicts_of, with_verdicts
from milepost.tasks.rewards import CHECK
from milepost.tasks.rollouts import single_turn
from milepost.tasks.samples import Prompt
from milepost.tasks.sampling import Sampling

SECONDS_A_TOKEN = 0.0005
WANTED, SIZE, LONGEST, PLACES = 16, 8, 2048, 128
FILTER = FilterSection(group="nonzero_std")
REWARD = RewardSection(name="random")


def response_length(sample_id: str) -> int:
    """A draw from a log-normal distribution that belongs to a sample of a prompt, in whichever step it is asked for."""
    group, _, index = sample_id.rpartition("-")
    drawn = random.Random(f"{group.rpartition('-')[2]} {index}").gauss(3.7, 1.4)
    return min(LONGEST, max(1, round(math.exp(drawn))))


@dataclass
class Engine:
    """Generate; what it is told to stop it gives up with the tokens so far."""

    version: WeightVersion
    stop: asyncio.Event
    generated: int = 0

    async def __call__(self, request: GenerateRequest) -> Completion:
        if self.stop.is_set():
            raise GenerationStopped(request.sample_id)
        left = max(1, response_length(request.sample_id) - (len(request.input_ids) - 1))
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(left * SECONDS_A_TOKEN):
                await self.stop.wait()
            tokens, reason = min(left, int((loop.time() - started) / SECONDS_A_TOKEN)), "abort"
        except TimeoutError:
            tokens, reason = left, "stop"
        self.generated += tokens
        found: Any = reason
        return Completion("x", [1] * tokens, [-0.5] * tokens, found, self.version, self.version)


@dataclass(frozen=True)
class Judge:
    """Graders that score all samples of a dropped group alike, and those of the others in turn."""

    drop: float

    async def map(self, function: str, items: Sequence[Sequence[Any]], **_: Any) -> list[Answer]:
        if function == CHECK:
            return [Answer(1, None, 0.0)]
        return [Answer([{"score": self._score(row)} for row in rows], None, 0.0) for _, rows in items]

    def _score(self, row: dict[str, Any]) -> float:
        drawn = int(hashlib.sha256(str(row["prompt"]).encode()).hexdigest()[:8], 16) / 16**8
        return 0.0 if drawn < self.drop else float(row["sample_id"][-1]) % 2


@dataclass
class Run:
    """Steps of a run: what is left of each is the beginning of the next, as in the tasks."""

    drop: float
    round_size: int
    by_group: bool
    partial: bool
    folder: str
    names: Iterator[int]
    left: dict[str, Prompt]
    table: TableRef | None = None
    generated: int = 0
    kept: int = 0

    async def step(self, number: int) -> None:
        carried = Carried({f"{number}-{name}": name for name in self.left}, (self.table,) if self.table else ())
        again = [replace(self.left[old], group_id=new) for new, old in carried.groups.items()]
        kept, tables = 0, []
        while kept < WANTED:
            fresh = (str(next(self.names)) for _ in range(self.round_size - len(again)))
            prompts = again + [Prompt(name, f"{number}-{name}", "b", name, [1], None, {}) for name in fresh]
            table = await self._round(number, prompts, carried, WANTED - kept)
            tables.append(table)
            kept += len(set(table.filter(table["kept"])["group_id"].to_pylist()))
            again = []
        chosen = list(dict.fromkeys(name for table in tables for name in _kept(table)))[:WANTED]
        rows = [row for table in tables for row in table.to_pylist()]
        self.kept += sum(len(row["response_token_ids"]) for row in rows if row["kept"] and row["group_id"] in chosen)
        cut = {row["group_id"]: row for row in rows if row["status"] == "interrupted"}
        self.left = {
            name: Prompt(row["prompt_id"], name, "b", row["prompt_id"], [1], None, {}) for name, row in cut.items()
        }
        self.table = write_table(f"{self.folder}/{number}", tables[-1], ROLLOUTS) if cut else None

    async def _round(self, number: int, prompts: list[Prompt], carried: Carried, missing: int) -> Any:
        early = EarlyStop(missing, REWARD, FILTER, graders=Judge(self.drop)) if self.round_size > WANTED else None
        stop = early.event if early else asyncio.Event()
        version = WeightVersion(number, "aa")
        engine = Engine(version, stop)
        sampling = Sampling("single_turn", {"max_new_tokens": LONGEST}, SIZE, LONGEST + 16, 0, partial=self.partial)
        earlier = earlier_samples(carried, [prompt.group_id for prompt in prompts]) if self.partial else {}
        asking = Asking(engine, single_turn, sampling, version, earlier, stop)
        place = {"run_id": "bench", "step": number, "shard": 0}
        rows = await generate_rows(asking, prompts, Collection(PLACES, self.by_group, early), place=place)
        self.generated += engine.generated
        table = from_rows(rows, ROLLOUTS)
        return filter_table(with_verdicts(table, await verdicts_of(table, REWARD, pool=Judge(self.drop))), FILTER)


def _kept(table: Any) -> list[str]:
    names: list[str] = table.filter(table["kept"])["group_id"].to_pylist()
    return names


async def measure(steps: int, *, drop: float, over: float, by_group: bool, partial: bool) -> tuple[float, float]:
    """Kept tokens for each generated one, and seconds a step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(drop, round(over * WANTED), by_group, partial, folder, itertools.count(), {})
        loop = asyncio.get_running_loop()
        started = loop.time()
        for number in range(steps):
            await run.step(number)
        return run.kept / run.generated, (loop.time() - started) / steps


def main(steps: int = 10) -> None:
    print("drop  rounds of  submission  partial  efficiency  s a step")
    for drop in (0.0, 0.3, 0.7):
        for over, partial in ((1.0, False), (2.0, False), (2.0, True)):
            for by_group in (True, False):
                found, seconds = asyncio.run(measure(steps, drop=drop, over=over, by_group=by_group, partial=partial))
                kind = "group" if by_group else "sample"
                size = round(over * WANTED)
                print(f"{drop:4.0%}  {size:9d}  {kind:10}  {partial!s:7}  {found:10.3f}  {seconds:8.2f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
