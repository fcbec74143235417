# mypy: ignore-errors
"""OpenHands (SDK 1.58) for many trials at once: its prompts, tools and loop; our executors.

In: a job over the link. Out: how it stopped, or the error of the model's service. `terminal` drives
the SDK's own terminal session over a terminal of the sandbox; `file_editor` runs the SDK's editor
on a mirror of the one path it was asked for. Run by a Python >= 3.12 that has openhands-sdk.
"""

import os
import posixpath
import shutil
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

from link import Link, serve
from openhands.sdk import LLM, Agent, LLMConvertibleEvent, LLMSummarizingCondenser, Tool
from openhands.sdk import LocalConversation as Conversation
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.event import ActionEvent, Condensation, MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm.exceptions import LLMContextWindowExceedError
from openhands.sdk.tool import register_tool
from openhands.tools.file_editor import FileEditorObservation, FileEditorTool
from openhands.tools.file_editor.impl import FileEditorExecutor
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool
from openhands.tools.terminal.definition import TerminalObservation
from openhands.tools.terminal.impl import TerminalExecutor
from openhands.tools.terminal.terminal.subprocess_terminal import SubprocessTerminal
from openhands.tools.terminal.terminal.terminal_session import TerminalSession
from pydantic import SecretStr

LINKS: dict[object, Link] = {}
START_SEC = 60
NUDGE = (
    "Please continue working on the task on whatever approach you think is suitable.\n"
    "When you think you have solved the question, please use the finish tool.\n"
    "IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN RESPONSE."
)
FETCH = r"""
if [ -d "$0" ]; then
  cd "$0" && find -L . -mindepth 1 -maxdepth 2 \( -type d -printf '%P/\0' -o -printf '%P\0' \)
  exit 3
fi
[ ! -e "$0" ] || exec cat -- "$0"
[ -d "$(dirname -- "$0")" ] && exit 4 || exit 5
"""
STORE = 'exec cat > "$0"'


class SandboxTerminal(SubprocessTerminal):
    """The SDK's terminal, over a descriptor of the sandbox's instead of a process of its own."""

    def __init__(self, link: Link) -> None:
        super().__init__(work_dir="/")
        self.link = link

    def initialize(self) -> None:
        # From the environment, so that it holds for the shell that follows an `exit` too.
        prompt = f"set +H; bind 'set enable-bracketed-paste off'; PS1=\"{self.PS1}\" PS2="
        self._pty_master_fd = self.link.terminal(PROMPT_COMMAND=prompt)
        os.set_blocking(self._pty_master_fd, True)
        self.reader_thread = threading.Thread(target=self._read, daemon=True)
        self.reader_thread.start()
        self._initialized = True
        if not self._wait_for_prompt(START_SEC):
            raise RuntimeError("the sandbox's shell shows no prompt")
        self.clear_screen()

    def _read(self) -> None:
        fd = self._pty_master_fd
        try:
            while data := os.read(fd, 65536):
                with self.output_lock:
                    self._add_text_to_buffer(data.decode("utf-8", errors="replace"))
        except OSError:
            pass
        self._closed = True
        os.close(fd)

    def _write_pty(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._pty_master_fd, data[:1024]) :]
        except OSError:
            self._closed = True

    def interrupt(self) -> bool:
        self._write_pty(b"\x03")
        return True

    def close(self) -> None:
        self._closed = True  # the harness ends the terminal, and with it the reader


class Terminal(TerminalExecutor):
    """One terminal session, opened anew on `reset` and after its death."""

    def __init__(self, link: Link) -> None:
        self.link, self.full_output_save_dir, self._pool = link, None, None
        self._open()

    def _open(self) -> None:
        self._session = TerminalSession(SandboxTerminal(self.link))
        self._session.initialize()

    def _reset_single_session(self) -> TerminalObservation:
        self._session.close()
        self._open()
        text = self._RESET_TEXT
        return TerminalObservation.from_text(text=text, command="[RESET]", exit_code=0)

    def __call__(self, action, conversation=None):
        self._session._closed |= self._session.terminal.closed
        return super().__call__(action, conversation)


class Editor(FileEditorExecutor):
    """The SDK's editor on a local mirror of one path of the sandbox at a time."""

    def __init__(self, link: Link) -> None:
        self.link, self.root, self.workdir = link, tempfile.mkdtemp(), link.job["workdir"]
        super().__init__(workspace_root=self.root + self.workdir)

    def __call__(self, action, conversation=None):
        path = posixpath.normpath(posixpath.join(self.workdir, action.path))
        local = Path(self.root + path)
        failure = self._fetch(path, local)
        before = local.read_bytes() if local.is_file() else None
        if not failure:
            absolute = action.path.startswith("/")
            mirrored = action.model_copy(update={"path": str(local) if absolute else action.path})
            text = super().__call__(mirrored).model_dump_json().replace(self.root, "")
            after = local.read_bytes() if local.is_file() else None
            if after is not None and after != before:
                code, output, _ = self.link.run("sh", "-c", STORE, path, stdin=after)
                failure = output.decode(errors="replace") if code else ""
        if failure:
            return FileEditorObservation.from_text(failure, command=action.command, is_error=True)
        return FileEditorObservation.model_validate_json(text)

    def _fetch(self, path: str, local: Path) -> str:
        shutil.rmtree(self.root)
        code, data, _ = self.link.run("sh", "-c", FETCH, path, cwd="/")
        Path(self.root).mkdir()
        if code in (0, 4):
            local.parent.mkdir(parents=True, exist_ok=True)
        match code:
            case 0:
                local.write_bytes(data)
            case 3:
                local.mkdir(parents=True)
                for name in sorted(filter(None, data.decode(errors="replace").split("\0"))):
                    entry = local / name
                    entry.mkdir(exist_ok=True) if name.endswith("/") else entry.touch()
            case 4 | 5:
                pass
            case _:
                return f"{path} cannot be read: {data.decode(errors='replace').strip()}"
        return ""


class SandboxTerminalTool(TerminalTool):
    @classmethod
    def create(cls, conv_state):
        return TerminalTool.create(conv_state, executor=Terminal(LINKS[conv_state.id]))


class SandboxEditorTool(FileEditorTool):
    @classmethod
    def create(cls, conv_state):
        link = LINKS[conv_state.id]
        # The sandbox's folder, in the tool's description: the same for every trial.
        workspace = SimpleNamespace(working_dir=link.job["workdir"])
        state = SimpleNamespace(workspace=workspace, agent=conv_state.agent)
        (tool,) = FileEditorTool.create(state)
        return [tool.set_executor(Editor(link))]


def make_agent(job: dict) -> Agent:
    model = job["model"]
    llm = LLM(
        usage_id="agent",
        model=f"openai/{model['name']}",
        base_url=job["base_url"],
        api_key=SecretStr(model["api_key"] or "none"),
        temperature=model["temperature"],
        max_output_tokens=model["max_tokens"],
        seed=model["seed"],
        timeout=int(model["timeout_sec"]),
        num_retries=job["retries"],
        retry_min_wait=1,
        api_mode="chat",
        caching_prompt=False,
        disable_vision=True,
        force_string_serializer=True,
        # Every model is taken for one with a reasoning effort, which drops the sampling parameters.
        capability_overrides={"supports_reasoning_effort": False, "supports_sampling_params": True},
    )
    size = job["condenser_events"]
    condenser_llm = llm.model_copy(update={"usage_id": "condenser"})
    condenser = LLMSummarizingCondenser(llm=condenser_llm, max_size=size) if size else None
    tools = [Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)]
    prompt = {"cli_mode": True, "soul_content": ""}
    return Agent(llm=llm, tools=tools, condenser=condenser, system_prompt_kwargs=prompt)


def work(link: Link) -> dict:
    job, last = link.job, {"response": None}
    facts = {"turns": 0, "nudges": 0, "condensations": 0}

    def on_event(event) -> None:
        facts["condensations"] += isinstance(event, Condensation)
        if isinstance(event, LLMConvertibleEvent):
            response = getattr(event, "llm_response_id", None)
            again = isinstance(event, ActionEvent) and response == last["response"]
            last["response"] = response
            if response and not again:
                facts["turns"] += 1
            (message,) = agent.llm.format_messages_for_llm([event.to_llm_message()])
            link.call("message", message=message, again=again)

    agent = make_agent(job)
    conversation = Conversation(
        agent,
        workspace=tempfile.mkdtemp(),
        callbacks=[on_event],
        visualizer=None,
        stuck_detection=job["stuck_detector"],
    )
    LINKS[conversation.id] = link
    link.on_close = conversation.pause
    try:
        conversation.send_message(job["instruction"])
        while True:
            conversation.max_iteration_per_run = max(job["max_turns"] - facts["turns"], 1)
            conversation.run()
            stop = how_it_stopped(conversation)
            if stop != "plain_text" or facts["nudges"] >= job["nudges"]:
                break
            if facts["turns"] >= job["max_turns"]:
                stop = "max_turns"
                break
            facts["nudges"] += 1
            conversation.send_message(NUDGE)
        result = {"stop": stop}
    except ConversationRunError as error:
        cause = error.original_exception
        too_long = isinstance(cause, LLMContextWindowExceedError)
        text = f"{type(cause).__name__} {' '.join(str(cause).split())[:300]}"
        result = {"stop": "context"} if too_long else {"error": text}
    finally:
        del LINKS[conversation.id]
    replies = conversation.conversation_stats.get_combined_metrics().response_latencies
    return {**result, "facts": {**facts, "model_calls": len(replies)}}


def how_it_stopped(conversation: Conversation) -> str:
    status = conversation.state.execution_status.value
    if status == "finished":
        said = [e for e in conversation.state.events if isinstance(e, ActionEvent | MessageEvent)]
        return "finished" if isinstance(said[-1], ActionEvent) else "plain_text"
    errors = [e for e in conversation.state.events if isinstance(e, ConversationErrorEvent)]
    if status == "error" and errors[-1].code == "MaxIterationsReached":
        return "max_turns"
    return {"stuck": "stuck", "paused": "cancelled"}[status]


if __name__ == "__main__":
    register_tool(TerminalTool.name, SandboxTerminalTool)
    register_tool(FileEditorTool.name, SandboxEditorTool)
    serve(work)
