"""What all groups of parameters have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from milepost.storage import redaction


class Section(BaseModel):
    """A group of parameters: immutable, strict about names, and with numbers that JSON has."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_serializer(mode="wrap", when_used="json")
    def _without_secrets(self, dump: SerializerFunctionWrapHandler) -> Any:
        return redaction.masked(dump(self))
