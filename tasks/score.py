"""The third node: a verdict for every sample, from graders that run elsewhere and against a deadline."""

import time
from collections.abc import Mapping
from types import MappingProxyType

from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.graders import GraderPool
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import RewardSection
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.generate import Shard
from milepost.tasks.grading import verdicts_of, with_verdicts
from milepost.tasks.score_ahead import ScoreAhead
from milepost.tasks.verdict import Verdict


@task(task_run_name="score-{shard.round}.{shard.index}", cache_policy=NO_CACHE)
async def score_rollouts(
    generated: TableRef,
    shard: Shard,
    reward: RewardSection,
    *,
    run: str,
    store: StepStore,
    known: Mapping[str, Verdict] = MappingProxyType({}),
    ahead: ScoreAhead | None = None,
) -> TableRef:
    """The shard's samples with their rewards and verdicts.

    Those that were asked for already are `known`, by sample, or wait `ahead`.
    """
    started = time.monotonic()
    slot = Slot("score", shard.round, shard.index)
    key = store.key(slot, [generated], reward.model_dump(mode="json", exclude={"workers"}, exclude_defaults=True))
    commit = store.committed(slot, key)
    if commit is None:
        pool = GraderPool.connect(run, workers=reward.workers)
        table = read_table(generated)
        said = await ahead.verdicts() if ahead else {}
        verdicts = await verdicts_of(table, reward, pool=pool, known={**known, **said})
        ref = store.write(str(slot), with_verdicts(table, verdicts), ROLLOUTS)
        record = {"grader_seconds": [round(verdict.seconds, 6) for verdict in verdicts]}
        commit = store.commit(slot, key, {"rollouts": ref}, record=record, started=started)
    return commit.tables["rollouts"]
