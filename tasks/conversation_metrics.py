"""Numbers of a step whose samples are conversations with tools."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.conversation import CONVERSATION


def conversation_metrics(table: pa.Table) -> dict[str, float]:
    """Turns, lengths with and without what tools said, and calls; nothing where no sample is a conversation.

    `rollout/retokenized` counts tokens that an engine was given otherwise than they were: it is 0.
    """
    metadata = [json.loads(text) for text in table["metadata"].to_pylist()]
    rows = [row for row, found in enumerate(metadata) if CONVERSATION in found]
    if not rows:
        return {}
    talks, chosen = table.take(rows), [metadata[row] for row in rows]
    masks = [sum(mask) for mask in talks["loss_mask"].to_pylist()]
    calls = sum(found["tool_calls"] for found in chosen)
    return {
        **_spread("multi_turn/round_number", talks["turns"].to_numpy()),
        **_spread("multi_turn/raw_response_length", pc.list_value_length(talks["response_token_ids"]).to_numpy()),
        **_spread("multi_turn/wo_obs_response_length", np.asarray(masks)),
        "rollout/tool_calls": calls / len(chosen),
        "rollout/tool_errors": sum(found["tool_errors"] for found in chosen) / max(1, calls),
        "rollout/retokenized": float(sum(found["retokenized"] for found in chosen)),
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
