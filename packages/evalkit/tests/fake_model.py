"""A chat service with a script: real HTTP on a real port, one recorded reply after another.

In: replies (a command, a text, or an (HTTP status, body) pair). Out: OpenAI chat completions, and
in `requests` the bodies that arrived. After the last reply it begins again.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

Reply = str | tuple[int, str] | dict[str, Any]


def call(command: str, name: str = "bash") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"command": command})}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}


class FakeModel:
    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies = replies
        self.requests: list[dict[str, Any]] = []
        self.base_url = ""
        self.connections: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(asyncio.create_task(self.handle(reader, writer)))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            length = next(
                int(line.split(":")[1]) for line in head if line.startswith("content-length")
            )
            self.requests.append(json.loads(await reader.readexactly(length)))
            reply = self.replies[(len(self.requests) - 1) % len(self.replies)]
            status, body = _encode(reply)
            writer.write(
                f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> list[str]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return []
    return head.decode().lower().split("\r\n")


def _encode(reply: Reply) -> tuple[int, bytes]:
    if isinstance(reply, tuple):
        return reply[0], reply[1].encode()
    message = {"content": reply} if isinstance(reply, str) else {"content": None, **reply}
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return 200, json.dumps({"choices": [choice]}).encode()


@asynccontextmanager
async def fake_model(replies: Sequence[Reply]) -> AsyncIterator[FakeModel]:
    model = FakeModel(replies)
    server = await asyncio.start_server(model.accept, "127.0.0.1", 0)
    model.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield model
    finally:
        server.close()
        await asyncio.gather(*model.connections)  # each ends when its client hangs up
