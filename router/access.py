"""Who may do what: with a token set, everything but generating and looking needs `Authorization: Bearer <token>`."""

import json
import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

# Engines have many paths that change weights or memory, and new ones appear: so what is open is listed.
OPEN_PATHS = frozenset(
    "/health /ready /health_generate /get_model_info /model_info"
    " /generate /encode /classify /tokenize /detokenize".split()
)
OPEN_PREFIX = "/v1/"
_ALWAYS_OPEN = frozenset(("/health", "/ready"))


def is_open(path: str) -> bool:
    """Whether a decoded path needs no token."""
    return path in OPEN_PATHS or (path.startswith(OPEN_PREFIX) and ".." not in path.split("/"))


class TokenGuard:
    """ASGI middleware. With `guards_data` generating needs the token too, and only /health and /ready do not.

    The router's own token is taken out of what is passed on, so no engine ever sees it.
    """

    def __init__(self, app: ASGIApp, *, token: str, guards_data: bool = False) -> None:
        if not token:
            raise ValueError("the router's token is empty: give one, or none at all")
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._is_open = _ALWAYS_OPEN.__contains__ if guards_data else is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [pair for pair in scope["headers"] if not self._carries_token(pair)]
        if len(headers) == len(scope["headers"]) and not self._is_open(scope["path"]):
            await _refuse(scope["path"], send)
            return
        await self._app({**scope, "headers": headers}, receive, send)

    def _carries_token(self, header: tuple[bytes, bytes]) -> bool:
        name, value = header
        return name == b"authorization" and secrets.compare_digest(value, self._expected)


async def _refuse(path: str, send: Send) -> None:
    message = f"{path} needs the header 'Authorization: Bearer TOKEN' with the router's token"
    body = json.dumps({"error": {"message": message, "code": 401}}).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
