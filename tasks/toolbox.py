"""Opening the tools of a run for a shard: the processes that make calls, and the tokenizer that results go through."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from milepost.engines.tokenizer import Tokenizer, load_tokenizer
from milepost.engines.tool_processes import connect_tools
from milepost.tasks.grading import Graders
from milepost.tasks.sampling import Sampling, TokenizerFolder
from milepost.tasks.tool_calls import tool_format
from milepost.tasks.tools import Toolbox, ToolRules, load_tools


@lru_cache(maxsize=2)
def _tokenizer(folder: TokenizerFolder) -> Tokenizer:
    return load_tokenizer(folder.path, trust_remote_code=folder.trusted)


async def connect_toolbox(sampling: Sampling, *, run: str, workers: int) -> Toolbox | None:
    """The tools of `run`, whose processes are running; None when it has no tools."""
    if sampling.tools is None or sampling.tokenizer is None:
        return None
    tokenizer = await asyncio.to_thread(_tokenizer, sampling.tokenizer)
    return toolbox(sampling.tools, tokenizer, connect_tools(run, workers=workers))


def toolbox(rules: ToolRules, tokenizer: Tokenizer, processes: Sequence[Graders]) -> Toolbox:
    """The tools for conversations under `rules`, with calls that `processes` make, each one at a time."""
    idle: asyncio.Queue[Graders] = asyncio.Queue()
    for one in processes:
        idle.put_nowait(one)
    chosen = tool_format(rules.format, tokenizer.chat_template)
    return Toolbox(rules, chosen, load_tools(rules.functions), tokenizer.tool_turns(), idle)
