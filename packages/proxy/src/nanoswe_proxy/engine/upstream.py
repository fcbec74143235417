"""A lean HTTP/1.1 client for token streams: connections kept open, no framework between.

In: a path and a body in pieces. Out: the `data:` payloads of the event stream as they arrive.
Closing the generator hangs up, which tells the server that nobody waits. Refuses (EngineError) an
origin that cannot be reached, is silent too long, hangs up, or answers an error, which is quoted.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from nanoswe_proxy.errors import EngineError

CONNECT_SEC, SILENCE_SEC = 10.0, 900.0
IDLE_SEC = 2.0  # servers close what is idle for longer (uvicorn: 5 s)


class Upstream:
    """Connections to one origin, for one event loop."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self.url, self._tls = url, parts.scheme == "https"
        self._at = (parts.hostname, parts.port or (443 if self._tls else 80))
        self._head = f"Host: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n"
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def events(self, path: str, *body: bytes) -> AsyncGenerator[bytes, None]:
        """POST `body` to `path` and stream the answer."""
        start = f"POST {path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        start += f"Content-Length: {sum(map(len, body))}\r\n\r\n"
        parts, whole, writer = list[bytes](), asyncio.Event(), None
        to = SimpleNamespace(on_body=parts.append, on_message_complete=whole.set)
        parser, now = HttpResponseParser(to), asyncio.get_running_loop().time
        status = parser.get_status_code
        try:
            async with asyncio.timeout(CONNECT_SEC) as patience:
                reader, writer = await self._connection()
                writer.writelines((start.encode(), *body))
                while not whole.is_set():
                    patience.reschedule(now() + SILENCE_SEC)
                    if not (data := await reader.read(1 << 16)):
                        raise EOFError(f"it hung up after {b''.join(parts)[:2000]!r}")
                    parser.feed_data(data)
                    if status() != 200:
                        continue
                    *lines, rest = b"".join(parts).split(b"\n")
                    parts[:] = [rest]
                    for line in lines:
                        if line.startswith(b"data:"):
                            yield line[5:].strip()
            if status() != 200:
                said = b"".join(parts)[:2000].decode("utf-8", "replace")
                raise EngineError(f"{self.url}{path} answered {status()} {said}")
        except (OSError, EOFError, HttpParserError) as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            if writer and whole.is_set() and status() == 200:
                self._idle.append((time.monotonic(), reader, writer))
            elif writer:
                writer.close()

    async def close(self) -> None:
        """Hang up the connections that nothing uses."""
        idle, self._idle = self._idle, []
        for _, _, writer in idle:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            young = time.monotonic() - since < IDLE_SEC
            if young and not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self._at, ssl=self._tls or None)
