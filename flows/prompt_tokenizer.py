"""What the prompts of a run are tokenised by."""

from milepost.engines.tokenizer import load_tokenizer
from milepost.storage.parameters import Parameters
from milepost.storage.prompt_rows import Tokenizer
from milepost.tasks.tool_prompts import tool_prompts


def prompt_tokenizer(parameters: Parameters, model_dir: str) -> Tokenizer:
    """The tokenizer in `model_dir`; for a run with tools, what shows them in its prompts. ValueError when it cannot."""
    tokenizer = load_tokenizer(model_dir, trust_remote_code=parameters.model.trust_remote_code)
    if not parameters.rollout.tools:
        return tokenizer
    if not parameters.data.apply_chat_template:
        raise ValueError("rollout.tools needs the chat template: set data.apply_chat_template=true")
    return tool_prompts(tokenizer, parameters.rollout)
