"""What MLflow keeps, made of the plain values of records: tags, points of curves, data sets, model files."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.storage import files
from milepost.storage.lineage_names import DIGEST_CHARACTERS, PREFIX, legal_name
from milepost.storage.outbox import Record

BATCH = 100  # the most tags or parameters in one request
BEST = PREFIX + "best"  # of a run's checkpoints, with the metric that it is by


def batches(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def log(
    client: Any,
    run: str,
    *,
    tags: Mapping[str, str],
    params: Mapping[str, str] | None = None,
    metrics: Sequence[Any] = (),
) -> None:
    """Tags, parameters and points, in requests that MLflow takes."""
    from mlflow.entities import Param, RunTag

    for tag_batch in batches([RunTag(name, value) for name, value in tags.items()]):
        client.log_batch(run, tags=tag_batch)
    for param_batch in batches([Param(name, value) for name, value in (params or {}).items()]):
        client.log_batch(run, params=param_batch)
    for metric_batch in batches(list(metrics)):
        client.log_batch(run, metrics=metric_batch)


def points(metrics: Mapping[str, float], record: Record) -> list[Any]:
    """One point of a curve for each metric, at the time of the record so that a second delivery adds none."""
    from mlflow.entities import Metric

    return [Metric(legal_name(name), value, record["time_ms"], record["step"]) for name, value in metrics.items()]


def scores(
    metrics: Mapping[str, float], record: Record, model: str | None, name: str, table: Mapping[str, Any]
) -> list[Any]:
    """Points that MLflow shows with the model and the data set that they are of."""
    from mlflow.entities import Metric

    of = {"model_id": model, "dataset_name": name, "dataset_digest": table["digest"][:DIGEST_CHARACTERS]}
    return [
        Metric(legal_name(key), value, record["time_ms"], record["of"]["step"], **of) for key, value in metrics.items()
    ]


def dataset(name: str, table: Mapping[str, Any]) -> Any:
    """A table as MLflow knows data: name, place and digest, cut short there and whole in source and tag."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = {"uri": table["uri"], "sha256": table["digest"]}
    found = Dataset(
        name=name,
        digest=table["digest"][:DIGEST_CHARACTERS],
        source_type="local" if files.is_local(table["uri"]) else table["uri"].partition(":")[0],
        source=json.dumps(source),
        profile=json.dumps({"rows": table["rows"], "schema": table["schema"]}),
    )
    # Of equal tables MLflow keeps the place of the first; these are of this one.
    tags = {"mlflow.data.context": name, PREFIX + "sha256": table["digest"], PREFIX + "uri": table["uri"]}
    return DatasetInput(found, [InputTag(key, value) for key, value in tags.items()])


def write_model_file(client: Any, model: Any) -> None:
    """The `MLmodel` file without which MLflow refuses to register an external model."""
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.models.utils import get_external_mlflow_model_spec

    with tempfile.TemporaryDirectory() as folder:
        get_external_mlflow_model_spec(model).save(str(Path(folder) / MLMODEL_FILE_NAME))
        client.log_model_artifacts(model.model_id, folder)


def mark_best(client: Any, model: str | None, before: Sequence[str], best: str) -> None:
    """Tag a model as the best one, and no longer those that were it before."""
    for other in before:
        if other != model:
            client.delete_logged_model_tag(other, BEST)
    if model is not None:
        client.set_logged_model_tags(model, {BEST: best})
