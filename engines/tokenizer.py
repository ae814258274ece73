"""Text to token ids and back, through the tokenizer of a model folder. Nothing is ever fetched."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from milepost.engines.chat_masks import Messages, Rendered, answers_of, marks_assistant, rendered, token_mask
from milepost.engines.tool_turns import ToolTurns
from milepost.storage import files

_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


@dataclass(frozen=True)
class Learnable:
    """The tokens of a dialogue, 1 for each that the assistant says, and the messages before the first of them."""

    asked: Messages
    ids: list[int]
    mask: list[int]


class Tokenizer:
    """The tokenizer of one model. `eos_ids` are all tokens that end a response, by tokenizer and by model."""

    def __init__(self, backend: Any, eos_ids: frozenset[int]) -> None:
        self._backend = backend
        self.eos_ids = eos_ids

    @property
    def vocab_size(self) -> int:
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    @property
    def chat_template(self) -> str:
        """Its text; empty when there is none."""
        return str(self._backend.get_chat_template()) if self.has_chat_template else ""

    @property
    def digest(self) -> str:
        """Of what every token is: equal where the same ids mean the same text."""
        return files.digest_of(files.canonical_json(self._backend.get_vocab()).encode())

    def differences(self, other: "Tokenizer") -> int:
        """How many tokens of `other` have another id here, or none."""
        return len(other._backend.get_vocab().items() - self._backend.get_vocab().items())

    def render(self, messages: list[dict[str, Any]] | str, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Prompt ids through the chat template, with the generation prompt; a string is one user message.

        Without a chat template a string is encoded as it is, and messages raise ValueError. So does what the template
        refuses, and tools that it does not show to the model.
        """
        if isinstance(messages, str):
            if not self.has_chat_template and not tools:
                return self.encode(messages)
            messages = [{"role": "user", "content": messages}]
        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template to render messages with: give prompts as strings")
        try:
            text = self._render_text(messages, True, tools)
            if tools and text == self._render_text(messages, True):
                raise ValueError("the chat template does not show tools to the model: take them out")
        except (TemplateError, TypeError) as error:  # the latter from content that the template cannot join
            raise ValueError(f"the chat template refuses it: {error}") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=False)
        return ids

    def shows_tools(self, tools: list[dict[str, Any]]) -> bool:
        """Whether the chat template tells the model of tools."""
        asked = [{"role": "user", "content": "?"}]
        return self.has_chat_template and self._render_text(asked, True, tools) != self._render_text(asked, True)

    def tool_turns(self) -> ToolTurns:
        """What the chat template puts between two answers of the model."""
        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template to render results of tools with")

        def render(messages: list[dict[str, Any]], asks: bool) -> str:
            try:
                return self._render_text(messages, asks)
            except (TemplateError, TypeError) as error:
                raise ValueError(f"the chat template refuses results of tools: {error}") from None

        def encode(text: str) -> list[int]:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False)
            return ids

        return ToolTurns(render, encode, {id: self.decode([id], skip_special_tokens=False) for id in self.eos_ids})

    def dialogues(self, messages: Messages, tools: Messages | None = None) -> list[Learnable]:
        """A dialogue as a whole, or its beginning up to each answer; see chat_masks. ValueError if these cannot be."""
        if not self.has_chat_template:
            raise ValueError("the tokenizer has no chat template to render messages with: give prompt and response")
        if not self._backend.is_fast:
            raise ValueError("the tokenizer cannot tell which text a token is of: give a folder with a tokenizer.json")
        try:
            if tools and not self.shows_tools(tools):
                raise ValueError("the chat template does not show tools to the model: take them out")
            if marks_assistant(self._backend.get_chat_template(tools=tools)):
                return [self._marked(messages, tools)]
            found = rendered(lambda part, asks: self._render_text(part, asks, tools), messages)
        except (TemplateError, TypeError) as error:  # the latter from content that the template cannot join
            raise ValueError(f"the chat template refuses it: {error}") from None
        return [self._masked(one) for one in found]

    def _marked(self, messages: Messages, tools: Messages | None) -> Learnable:
        self._render_text(messages, False, tools)  # refuses what the template cannot show
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._backend.apply_chat_template(messages, tools=tools, **options)
        return Learnable(messages[: answers_of(messages)[0]], list(found["input_ids"]), list(found["assistant_masks"]))

    def _masked(self, found: Rendered) -> Learnable:
        encoded = self._backend(found.text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        return Learnable(found.asked, ids, token_mask(ids, encoded["offset_mapping"], found.spans, self.eos_ids))

    def _render_text(
        self, messages: list[dict[str, Any]], asks: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        text: str = self._backend.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=asks)
        for at, message in enumerate(messages):
            if isinstance(message.get("content"), list) and str(message["content"]) in text:
                raise ValueError(f"the chat template cannot join the parts of message {at}: give its content as text")
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text)
        return ids

    def encode_response(self, text: str, *, ended: bool) -> list[int]:
        """Ids of what follows a prompt, with the token that ends a response if the model `ended` it."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False)
        return [*ids, self._backend.eos_token_id] if ended and self._backend.eos_token_id is not None else ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def load_tokenizer(model_dir: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in a model folder; ValueError when there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(model_dir)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(f"{model_dir!r} holds no tokenizer: give a folder with a tokenizer.json")
    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
    # For these AutoTokenizer goes by the model's type, and some types (Qwen2) rebuild the tokenizer by their own rules.
    is_generic = settings.get("tokenizer_class") in _GENERIC and (folder / "tokenizer.json").is_file()
    loader = PreTrainedTokenizerFast if is_generic else AutoTokenizer
    backend = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    own = [] if backend.eos_token_id is None else [backend.eos_token_id]
    return Tokenizer(backend, frozenset([*own, *model_eos_ids(model_dir)]))


def model_eos_ids(model_dir: str) -> list[int]:
    """The end tokens that a model folder's generation_config.json, or else its config.json, names."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def write_character_tokenizer(directory: str, characters: str) -> None:
    """Write a Hugging Face tokenizer with one token a character, after pad (0), end (1) and unknown (2)."""
    repeated = sorted({character for character in characters if characters.count(character) > 1})
    if repeated:
        raise ValueError(f"characters holds {repeated} more than once: name each character once")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    ).save_pretrained(directory)


def token_texts(model_folder: str, ids: Sequence[int]) -> list[str]:
    """The text of each token, without the seconds that importing transformers takes.

    Its number where the folder has no tokenizer.json, or has it no more.
    """
    tokenizer = _raw(model_folder)
    if tokenizer is None:
        return [str(token) for token in ids]
    return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def prompt_texts(model_folder: str, ids: Sequence[int]) -> tuple[str, str]:
    """A prompt as the model reads it, and that without special tokens; empty where the folder has no tokenizer.json."""
    tokenizer = _raw(model_folder)
    if tokenizer is None:
        return "", ""
    return tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids)


def _raw(model_folder: str) -> RawTokenizer | None:
    path = Path(model_folder) / "tokenizer.json"
    return RawTokenizer.from_file(str(path)) if path.is_file() else None
