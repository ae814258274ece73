"""The body of a request as it comes in: sent on piece by piece, and kept as long as it may have to be sent again."""

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Receive

KEPT_BYTES = 16 * 2**20


class BodyTooLarge(ValueError):
    """More came than the router lets through."""


class ClientLeft(ConnectionError):
    """The client closed its connection before its request was complete."""


class RequestBody:
    """Read by one reader at a time. `problem` is why reading ended before the body did."""

    def __init__(self, receive: Receive, *, limit_bytes: int, kept_bytes: int = KEPT_BYTES) -> None:
        self._receive = receive
        self._limit_bytes, self._kept_bytes = limit_bytes, kept_bytes
        self._kept: list[bytes] = []
        self._came = self._kept_so_far = 0  # bytes
        self.is_complete = False
        self.problem: BodyTooLarge | ClientLeft | None = None
        self._ended = asyncio.Event()

    @property
    def can_be_sent_again(self) -> bool:
        return self._kept_so_far == self._came

    @property
    def kept(self) -> bytes:
        """What has come and was kept: the beginning of the body, if not all of it."""
        return b"".join(self._kept)

    async def first(self) -> None:
        """Read the first piece, which is all of a small body."""
        await self._read()

    async def whole(self) -> bytes:
        """All of it."""
        while not self.is_complete:
            await self._read(keep=True)
        return self.kept

    async def pieces(self) -> AsyncIterator[bytes]:
        """From its beginning: first what is kept, then what comes."""
        for piece in list(self._kept):
            yield piece
        while not self.is_complete:
            piece = await self._read()
            if piece:
                yield piece

    async def left(self) -> None:
        """Return when the client has closed its connection; nothing else may read by then."""
        await self._ended.wait()
        while self.problem is None and (await self._receive())["type"] != "http.disconnect":
            pass

    async def _read(self, *, keep: bool = False) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._fail(ClientLeft("the client left"))
        piece: bytes = message.get("body", b"")
        self._came += len(piece)
        if self._came > self._limit_bytes:
            self._fail(BodyTooLarge(f"the body has more than {self._limit_bytes} bytes, which is the router's limit"))
        if piece and (keep or self._came <= self._kept_bytes):
            self._kept.append(piece)
            self._kept_so_far += len(piece)
        if not message.get("more_body", False):
            self.is_complete = True
            self._ended.set()
        return piece

    def _fail(self, problem: BodyTooLarge | ClientLeft) -> None:
        self.problem = problem
        self._ended.set()
        raise problem
