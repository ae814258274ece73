"""The third node: a verdict for every sample, from graders that run elsewhere and against a deadline."""

import logging
import time
from collections.abc import Mapping, Sequence
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

_log = logging.getLogger(__name__)


def why_none(verdicts: Sequence[Verdict]) -> str:
    """Why the first that a grader was asked for has no score, where none of them has one; else nothing."""
    asked = [verdict for verdict in verdicts if verdict.grader]
    return asked[0].reason if asked and all(verdict.score is None for verdict in asked) else ""


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
        if reason := why_none(verdicts):  # likelier the reward's fault than that of so many samples
            _log.warning("no sample of %s could be scored, the first for this: %s", ref.uri, reason)
        record = {"grader_seconds": [round(verdict.seconds, 6) for verdict in verdicts]}
        commit = store.commit(slot, key, {"rollouts": ref}, record=record, started=started)
    return commit.tables["rollouts"]
