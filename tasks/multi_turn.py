"""A conversation of a model with tools: it answers, what it calls is called, it is told, and it answers again."""

from milepost.engines.protocols import Completion, Generate
from milepost.router.client import GenerationStopped
from milepost.storage.prompt_rows import TOOLS
from milepost.tasks.conversation import Conversation, Ended
from milepost.tasks.rollout_params import RolloutParams
from milepost.tasks.samples import Prompt, Sample
from milepost.tasks.tools import Toolbox, name_of


async def multi_turn(generate: Generate, prompt: Prompt, params: RolloutParams) -> Sample:
    """A conversation that ends with an answer that calls no tool, or at a limit, where it counts as truncated.

    Answers are limited in number by `rollout.max_turns`, and in tokens of all of them by `rollout.max_new_tokens`;
    with prompt and results they have to fit the context.
    """
    tools = params.tools
    if tools is None:
        raise ValueError("multi_turn needs tools: name functions as pkg.mod:fn in rollout.tools")
    shown = tools.definitions(prompt.metadata)
    names = [name_of(tool) for tool in shown]
    talk = Conversation(prompt.token_ids, params)
    ended: Ended | None = None
    while ended is None:
        try:
            said = await generate(talk.request())
        except GenerationStopped:
            if not talk.heard:
                raise
            ended = "abort"
        else:
            talk.hear(said)
            ended = await _why_it_ends(talk, said, tools, names)
    return talk.sample(ended, {TOOLS: shown})


async def _why_it_ends(talk: Conversation, said: Completion, tools: Toolbox, names: list[str]) -> Ended | None:
    """None when the model has been told what its calls came to, and may go on."""
    if said.finish_reason == "abort":
        return "abort"
    if said.finish_reason == "length":
        return talk.limit or "max_new_tokens"
    calls = tools.calls(said.text)
    if not calls:
        return "answer"
    if len(talk.heard) >= tools.rules.max_turns:
        return "max_turns"
    if talk.limit is not None:
        return talk.limit
    results = await tools.results(calls, names)
    ids = tools.between(results, after=said.output_ids[-1] if said.output_ids else -1)
    return None if talk.tell(results, ids) else "context_length"
