"""`command` in a real sandbox: what a program there can reach of the model's service, by HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nanoswe_evalkit.agents.base import ModelConfig
from nanoswe_evalkit.agents.command import CommandAgent
from nanoswe_evalkit.outcome import Outcome, Stop
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.trial import Trial, run_trial
from nanoswe_harbor.task import Task

HELLO = {"choices": [{"message": {"role": "assistant", "content": "hi"}}]}
ASK = """python3 - <<'END'
import json, os, socket
port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
for method, target, body in json.loads(%r):
    with socket.create_connection(("127.0.0.1", port)) as sock:
        head = f"{method} {target} HTTP/1.0\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
        sock.sendall((head + body).encode())
        print(sock.makefile().readline().split()[1], end=" ")
END"""


class Service:
    """Keeps the first line and the key of every request; answers by its path."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.url = ""
        self.answers: dict[str, tuple[str, Any]] = {}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        size = [int(x.split(":")[1]) for x in head if x.lower().startswith("content-length")]
        await reader.readexactly(sum(size))
        assert "authorization: Bearer secret" in [
            x.replace("Authorization", "authorization") for x in head
        ]
        self.lines.append(head[0])
        status, body = self.answers.get(head[0].split()[1], ("200 OK", HELLO))
        data = json.dumps(body).encode()
        extra = f"location: {self.url}/stolen\r\n" if status.startswith("3") else ""
        text = (
            f"HTTP/1.1 {status}\r\n{extra}content-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(text.encode() + data)
        writer.close()


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    made = Service()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield made
    finally:
        server.close()


def _run(
    sandboxes: SandboxFactory, task: Task, command: str, answers: dict[str, Any] | None = None
) -> tuple[Trial, list[str]]:
    async def main() -> tuple[Trial, list[str]]:
        agent = CommandAgent(command, 9)
        async with service() as served:
            served.answers = answers or {}
            trial = await run_trial(
                task, 0, trial_id="x.0", agent=agent, sandboxes=sandboxes, base_url=served.url,
                model=ModelConfig("m", api_key="secret"),
            )  # fmt: skip
            await agent.close()
        return trial, served.lines

    return asyncio.run(main())


def _ask(*requests: tuple[str, str, str]) -> str:
    return ASK % json.dumps(requests)


@pytest.mark.parametrize(
    "target",
    ["@127.0.0.1:9/steal", "/../../sessions", "//evil/v1/models", "http://evil/v1/models", "/v1",
     "/v1/../sessions", "/v1/models/../../x", "/v1/chat/completions/", "/v1/files", "/sessions",
     "/v1/%2e%2e/sessions", "/chat/completions", "/v1/messages/count_tokens/x"],
)  # fmt: skip
def test_no_word_of_the_sandbox_is_in_a_url(
    sandboxes: SandboxFactory, task: Task, target: str
) -> None:
    trial, lines = _run(sandboxes, task, _ask(*((m, target, "{}") for m in ("GET", "POST"))))
    assert trial.agent["output"].split() == ["404", "404"] and lines == []


def test_the_routes_of_the_model_are_served(sandboxes: SandboxFactory, task: Task) -> None:
    bodies = ["/v1/chat/completions", "/v1/messages?beta=true", "/v1/responses?x=@evil"]
    requests = [("POST", target, "{}") for target in [*bodies, "/v1/messages/count_tokens"]]
    requests += [("GET", "/v1/models", ""), ("GET", "/v1/messages", ""), ("POST", "/v1/models", "")]
    trial, lines = _run(sandboxes, task, _ask(*requests))
    assert trial.agent["output"].split() == ["200"] * 5 + ["404"] * 2
    paths = ["chat/completions", "messages", "responses", "messages/count_tokens"]
    wanted = [f"POST /v1/{path} HTTP/1.1" for path in paths]
    assert lines == [*wanted, "GET /v1/models HTTP/1.1"]
    assert (trial.stop, trial.agent["model_calls"]) == (Stop.FINISHED, 3)


def test_no_redirection_is_followed(sandboxes: SandboxFactory, task: Task) -> None:
    answers = {"/v1/chat/completions": ("307 Elsewhere", {}), "/v1/models": ("302 Found", {})}
    requests = [("POST", "/v1/chat/completions", "{}"), ("GET", "/v1/models", "")]
    trial, lines = _run(sandboxes, task, _ask(*requests), answers)
    assert trial.agent["output"].split() == ["307", "302"] and len(lines) == 2


def test_what_a_program_sends_does_not_break_the_run(sandboxes: SandboxFactory, task: Task) -> None:
    bad = ["[1]", "{", "[" * 100_000, '"x"']
    good = [json.dumps({"messages": said}) for said in ("abc", [1], [{"content": "x"}], None)]
    requests = [("POST", "/v1/chat/completions", body) for body in bad + good]
    trial, lines = _run(sandboxes, task, _ask(*requests))
    assert trial.agent["output"].split() == ["400"] * 4 + ["200"] * 4 and len(lines) == 4
    assert (trial.outcome, trial.turns) == (Outcome.NO_PATCH, 4)


@pytest.mark.parametrize(
    "command",
    ["exit 127", "kill -9 $PPID", "kill -9 -1", "exit 126; exit", "X=1; nosuchprogram",
     """echo '{"exit": 0}' > /proc/$PPID/fd/1; sleep 1""", "echo '[]' > /proc/$PPID/fd/1",
     "head -c 70000000 /dev/zero | tr '\\0' x > /proc/$PPID/fd/1; sleep 1"],
)  # fmt: skip
def test_every_end_of_a_program_is_its_own(
    sandboxes: SandboxFactory, task: Task, command: str
) -> None:
    trial, _ = _run(sandboxes, task, f"touch done; {command}")
    assert (trial.stop, trial.outcome) == (Stop.FINISHED, Outcome.UNRESOLVED), trial.error
    assert "b/done" in trial.patch and "exit_code" in trial.agent


@pytest.mark.parametrize("command", ["nosuch -p hello", "/no/such", "./nosuch", "  nosuch; true"])
def test_a_program_that_is_not_there_is_ours_to_repeat(
    sandboxes: SandboxFactory, task: Task, command: str
) -> None:
    trial, _ = _run(sandboxes, task, command)
    assert trial.outcome is Outcome.INFRA_ERROR and "cannot be run" in trial.error
    assert "nosuch" in trial.error or "/no/such" in trial.error


@pytest.mark.parametrize(
    ("status", "before", "ours"),
    [("400 Bad", 0, True), ("400 Bad", 1, False), ("422 Bad", 1, False), ("429 Slow", 1, True),
     ("401 Who", 1, True), ("500 Oh", 1, True), ("503 No", 1, True)],
)  # fmt: skip
def test_what_the_service_refuses_for_what_it_was_sent_is_the_programs(
    sandboxes: SandboxFactory, task: Task, status: str, before: int, ours: bool
) -> None:
    """Once it has answered, the model writes what is sent; before, the recipe may be wrong."""
    answers = {"/v1/messages": (status, {"error": "bad"})}
    requests = [("POST", "/v1/responses", "{}")] * before + [("POST", "/v1/messages", "{}")]
    trial, _ = _run(sandboxes, task, _ask(*requests), answers)
    assert (trial.outcome is Outcome.INFRA_ERROR) is ours, trial.error
    assert trial.agent["model_status"] == int(status[:3])
