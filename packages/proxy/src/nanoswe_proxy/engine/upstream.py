"""A lean HTTP/1.1 client for token streams: connections kept open, no framework between.

In: a path and a body in pieces (a long cached prefix is not copied into a new string). Out: the
`data:` payloads of the event stream as they arrive. Closing the generator hangs up, which is how a
server learns that nobody waits. Refuses (EngineError) an origin that cannot be reached, is silent
for too long, hangs up, or answers with an error, which is quoted.
"""

import asyncio
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from nanoswe_proxy.errors import EngineError

CONNECT_SEC, SILENCE_SEC = 10.0, 900.0


class Upstream:
    """Connections to one origin, for one event loop."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"{url!r} is no engine URL: give http://HOST:PORT")
        self.url, self._tls = url, parts.scheme == "https"
        self._at = (parts.hostname, parts.port or (443 if self._tls else 80))
        key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = f"Host: {parts.netloc}\r\n{key}Content-Type: application/json\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def events(self, path: str, *body: bytes) -> AsyncGenerator[bytes, None]:
        """POST `body` to `path` and stream the answer."""
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {sum(map(len, body))}\r\n\r\n"
        finished, rest = False, b""
        reader, writer, status = await self._send((head.encode(), *body))
        try:
            if b" 200 " not in status or b"chunked" not in status.lower():
                answer = status.splitlines()[0] + b" " + await reader.read(2000)
                raise EngineError(f"{self.url}{path} answered {answer.decode('utf-8', 'replace')}")
            while True:
                async with asyncio.timeout(SILENCE_SEC):
                    size = int(await reader.readline(), 16)
                    part = await reader.readexactly(size + 2)
                if not size:
                    break
                *lines, rest = (rest + part[:-2]).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
            finished = True
        except (OSError, EOFError, ValueError) as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            if finished:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _send(
        self, request: tuple[bytes, ...]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """A connection on which the answer has begun. One that went stale meanwhile is replaced."""
        while True:
            stale = bool(self._idle)
            try:
                async with asyncio.timeout(CONNECT_SEC):
                    reader, writer = (
                        self._idle.pop()
                        if stale
                        else await asyncio.open_connection(*self._at, ssl=self._tls or None)
                    )
            except OSError as error:
                raise EngineError(f"{self.url} cannot be reached: {error}") from error
            try:
                writer.writelines(request)
                async with asyncio.timeout(SILENCE_SEC):
                    return reader, writer, await reader.readuntil(b"\r\n\r\n")
            except BaseException as error:
                writer.close()
                if stale and isinstance(error, ConnectionError | EOFError):
                    continue
                if isinstance(error, OSError | EOFError):
                    raise EngineError(f"{self.url}: {type(error).__name__}: {error}") from error
                raise

    async def close(self) -> None:
        """Hang up what is idle."""
        while self._idle:
            writer = self._idle.pop()[1]
            writer.close()
            await writer.wait_closed()
