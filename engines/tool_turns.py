"""The tokens between two answers of a model: what its chat template puts there for the results of its tool calls.

They are found by rendering a dialogue of fixed words with the results and without, so that what the model said is never
rendered, and so never tokenised again. A template for which that cannot be done is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
Encode = Callable[[str], list[int]]

_WORD = "milepost"
_ASKED = {"role": "user", "content": _WORD}


class ToolTurns:
    """`render` and `encode` are a tokenizer's; `ends` has the text of every token that ends an answer."""

    def __init__(self, render: Render, encode: Encode, ends: Mapping[int, str]) -> None:
        self._render = render
        self._encode = encode
        self._ends = ends

    def between(self, results: Messages, *, after: int) -> list[int]:
        """The tokens that follow an answer up to where the next one begins, with `results` as messages of role `tool`.

        They begin with a token that ends the answer unless `after`, its last one, does that already.
        """
        text = self._text([_ASKED], results)
        ids = self._encode(text)
        if not ids or ids[0] not in self._ends:
            raise ValueError(f"the tokenizer makes no token of its own of the end of an answer in {text[:40]!r}")
        return ids[1:] if after in self._ends else ids

    def check(self) -> None:
        """ValueError unless the template shows one result, and several, in words that depend on nothing before."""
        for count in (1, 2):
            results = [tool_message(f"tool{at}", f"result{at}", at) for at in range(count)]
            text = self._text([_ASKED], results)
            missing = [message["content"] for message in results if message["content"] not in text]
            if missing:
                raise ValueError("the chat template does not show messages of role 'tool' to the model")
            earlier = [_ASKED, _answer(results[:1], _WORD), *results[:1]]
            if self._text(earlier, results) != text:
                raise ValueError("the chat template shows results of tools otherwise in a later turn")
            self.between(results, after=-1)

    def _text(self, history: Messages, results: Messages) -> str:
        """What follows the last answer in `history`, from the token on that ends it."""
        try:
            return self._suffix([*history, _answer(results, _WORD)], results)
        except ValueError:
            if len(results) == 1:
                raise
        # Some templates know only one call in an answer, and any number of results.
        return self._suffix([*history, _answer(results[:1], _WORD)], results)

    def _suffix(self, talk: Messages, results: Messages) -> str:
        before, after = self._render(talk, False), self._render([*talk, *results], True)
        if not after.startswith(before):
            raise ValueError("the chat template renders an answer otherwise when results of tools follow it")
        said = max(before.rfind(word) for word in (_WORD, results[0]["name"]))
        end = max((before.rfind(text) for text in self._ends.values()), default=-1)
        if end <= said:
            raise ValueError(
                f"the chat template ends an answer with none of the end tokens {sorted(self._ends.values())}"
            )
        return after[end:]


def tool_message(name: str, content: str, at: int) -> dict[str, Any]:
    """The result of call number `at` of an answer, as a message."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{at:05d}", "content": content}


def _answer(results: Sequence[Mapping[str, Any]], word: str) -> dict[str, Any]:
    """An answer that calls for these results. Templates that drop an empty thought from earlier answers keep a word."""
    calls = [
        {"id": result["tool_call_id"], "type": "function", "function": {"name": result["name"], "arguments": {}}}
        for result in results
    ]
    return {"role": "assistant", "content": word, "reasoning_content": word, "tool_calls": calls}
