"""Asking an SGLang server to do something, and waiting for it: the control calls, past any proxy."""

import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from milepost.storage.redaction import masked_text

CONNECT_SECONDS = 5.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class SglangRefused(ValueError):
    """The server answered that it did not do what it was asked for."""


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_seconds: float) -> Any:
    """What the server at `url` answers: JSON, or None when there is none. With a body it is a POST.

    SglangRefused for an answer of 400 and more, ConnectionError when there is none inside the deadline.
    """
    data, shown = None if body is None else json.dumps(body).encode(), masked_text(url)
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_seconds) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace").strip()[:1000] or error.reason
        raise SglangRefused(f"SGLang at {shown} refused {path} ({error.code}): {_message(said)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"SGLang at {shown} did not answer {path}: {reason or type(error).__name__}") from None
    try:
        return json.loads(text)
    except ValueError:
        return None


def listens(url: str) -> bool:
    """False only where the connection is refused: a server that is slow, or behind a slow network, is there."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_SECONDS).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True


def _message(said: str) -> str:
    """The sentence in an error's JSON, whichever of SGLang's shapes it has."""
    try:
        found = json.loads(said)
    except ValueError:
        return said
    if isinstance(found, dict):
        found = found.get("error", found)
        found = found.get("message", found) if isinstance(found, dict) else found
    return str(found).strip().rstrip(".")
