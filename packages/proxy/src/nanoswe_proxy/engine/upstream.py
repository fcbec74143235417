"""A lean HTTP/1.1 client for token streams: connections kept open, no framework between.

In: a path and a body in pieces. Out: the `data:` payloads of the event stream as they arrive.
Closing the generator hangs up, which tells the server that nobody waits. Refuses (EngineError) an
origin that cannot be reached, is silent too long, hangs up, or answers an error, which is quoted.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from urllib.parse import urlsplit

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
        finished, rest, writer, now = False, b"", None, asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(CONNECT_SEC) as patience:
                reader, writer = await self._connection()
                writer.writelines((start.encode(), *body))
                patience.reschedule(now() + SILENCE_SEC)
                head = await reader.readuntil(b"\r\n\r\n")
                if b" 200 " not in head or b"chunked" not in head.lower():
                    answer = head.splitlines()[0] + b" " + await reader.read(2000)
                    said = answer.decode("utf-8", "replace")
                    raise EngineError(f"{self.url}{path} answered {said}")
                size = 1
                while size:
                    patience.reschedule(now() + SILENCE_SEC)
                    size = int(await reader.readline(), 16)
                    part = await reader.readexactly(size + 2)
                    *lines, rest = (rest + part[:-2]).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):
                            yield line[5:].strip()
            finished = True
        except (OSError, EOFError, ValueError) as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            if finished and writer:
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
