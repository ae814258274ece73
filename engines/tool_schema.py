"""What a model is told of a function that it may call: a JSON schema, made from type hints and docstring."""

from collections.abc import Callable
from typing import Any


def tool_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The definition of a tool in OpenAI's shape; ValueError says what `function`, named as `name`, lacks for it."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        definition: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        wanted = "type hints, and a docstring with each argument under 'Args:'"
        raise ValueError(f"tool {name!r} needs {wanted}: {text}") from None
    definition["function"].pop("return", None)  # not in OpenAI's shape, and no model was taught it
    return definition
