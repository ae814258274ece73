"""A supervised fine-tuning from the command line: checked first, then made against a Prefect server."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from milepost.flows.launch import run_flow, serving
from milepost.flows.recipe import parameters_of, parse_override, with_overrides
from milepost.flows.sft import DEFAULT_LR, sft
from milepost.flows.sft_plan import plan_sft
from milepost.flows.sft_run import require_same
from milepost.storage import redaction, runs
from milepost.storage.registry import nearest
from milepost.storage.sft_rows import SftDataSection

SECTIONS = ("model", "optimizer", "perf", "engines", "tracking")


def sections_of(model: str, data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The sections of the flow; ValueError or LookupError for the first override that none of them has."""
    own, others = dict(data), []
    for text in overrides:
        section, field, value = parse_override(text)
        if section == "data":
            own[field] = _known(field, value)
        elif section in SECTIONS:
            others.append(text)
        else:
            known = ["data", *SECTIONS]
            raise LookupError(
                f"--set {redaction.masked_text(text)}: fine-tuning has no section {section!r}"
                f"{nearest(section, known) or ','} it has {', '.join(known)}"
            )
    found = parameters_of(with_overrides({"model": {"path": model}, "optimizer": {"lr": DEFAULT_LR}}, others))
    return {name: getattr(found, name) for name in SECTIONS} | {"data": _data(own)}


def _known(field: str, value: Any) -> Any:
    known = list(SftDataSection.model_fields)
    if field not in known:
        raise LookupError(f"unknown key 'data.{field}'{nearest(field, known)}; known: {known}")
    return value


def _data(content: Mapping[str, Any]) -> SftDataSection:
    try:
        return SftDataSection.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["data", *map(str, first["loc"])])
        raise ValueError(f"{where} is {redaction.masked(first['input'], where)!r}: {first['msg'].lower()}") from None


def launch_sft(
    run: str,
    root: str,
    *,
    model: str,
    data: Mapping[str, Any],
    overrides: Sequence[str],
    steps: int | None,
    epochs: float | None,
) -> dict[str, Any]:
    """Fine-tune, and return what came of it; what cannot be is refused before any server is started."""
    sections = sections_of(model, data, overrides)
    require_same(plan_sft(runs.run_folder(root, run), **sections, steps=steps, epochs=epochs))
    with serving():
        return run_flow(lambda: sft(run=run, root=root, steps=steps, epochs=epochs, **sections))
