# mypy: ignore-errors
"""OpenHands (SDK 1.58) for many trials at once: its prompts, tools and loop, our sandbox.

In: link.py's jobs. Out: how each stopped. `terminal` is the SDK's own session over a terminal of
the sandbox, `file_editor` its own editor on a mirror of one file. Needs Python >= 3.12.
"""

import os
import posixpath
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from link import Link, serve, start
from openhands.sdk import LLM, Agent, LLMConvertibleEvent, LLMSummarizingCondenser, Tool
from openhands.sdk import LocalConversation as Conversation
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.event import ActionEvent, Condensation, MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.tool import register_tool
from openhands.tools.file_editor import FileEditorObservation, FileEditorTool
from openhands.tools.file_editor.impl import FileEditorExecutor
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool, impl
from openhands.tools.terminal.terminal.subprocess_terminal import SubprocessTerminal
from openhands.tools.terminal.terminal.terminal_session import TerminalSession
from pydantic import SecretStr

START_SEC = 60
NUDGE = "Please continue. When the task is done, use the finish tool. Nobody here can answer you."
FETCH = r"""[ -e "$0" ] || { [ -d "$(dirname -- "$0")" ] && exit 4 || exit 5; }
[ -d "$0" ] || exec cat -- "$0"
cd "$0" && find -L . -mindepth 1 -maxdepth 2 \( -type d -printf '%P/\0' -o -printf '%P\0' \); exit 3
"""


LINKS: dict[str, Link] = {}  # by the conversation's own, empty folder


class SandboxTerminal(SubprocessTerminal):
    """The SDK's terminal, over a descriptor of the sandbox's instead of a process of its own."""

    def initialize(self) -> None:
        # From the environment, so that it holds for the shell that follows an `exit` too.
        prompt = f"set +H; bind 'set enable-bracketed-paste off'; PS1=\"{self.PS1}\" PS2="
        self._pty_master_fd = LINKS[self.work_dir].call("terminal", PROMPT_COMMAND=prompt)
        os.set_blocking(self._pty_master_fd, True)
        start(self._read, self._pty_master_fd)
        self._initialized = True
        if not self._wait_for_prompt(START_SEC):
            raise RuntimeError("the sandbox's shell shows no prompt")
        self.clear_screen()

    def _read(self, fd: int) -> None:
        with suppress(OSError):
            while data := os.read(fd, 65536):
                with self.output_lock:
                    self._add_text_to_buffer(data.decode("utf-8", errors="replace"))
        self._closed = self.session._closed = True  # the next command opens another
        os.close(fd)

    def _write_pty(self, data: bytes) -> None:
        while data and not self._closed:
            data = data[os.write(self._pty_master_fd, data[:1024]) :]

    def close(self) -> None:
        self._closed = True  # the harness ends the terminal, and with it the reader


def create_terminal_session(work_dir: str, no_change_timeout_seconds=None, **_) -> TerminalSession:
    terminal = SandboxTerminal(work_dir)
    terminal.session = TerminalSession(terminal, no_change_timeout_seconds)
    return terminal.session


class Editor(FileEditorExecutor):
    """The SDK's editor on a local mirror of one path of the sandbox at a time."""

    def __init__(self, link: Link) -> None:
        self.link, self.root, self.workdir = link, tempfile.mkdtemp(), link.job["workdir"]
        super().__init__(workspace_root=self.root + self.workdir)

    def __call__(self, action, conversation=None):
        path = posixpath.normpath(posixpath.join(self.workdir, action.path))
        local = Path(self.root + path)
        try:
            failure = self._fetch(path, local)
        except OSError as error:  # the sandbox's names may be none for a file here
            failure = f"{path} cannot be read: {error.strerror}"
        before = local.read_bytes() if local.is_file() else None
        if not failure:
            # The editor refuses what is not absolute, but looks for it here first.
            to = str(local) if action.path[:1] == "/" else posixpath.relpath(path, self.workdir)
            text = super().__call__(action.model_copy(update={"path": to})).model_dump_json()
            after = local.read_bytes() if local.is_file() else None
            if after is not None and after != before:
                code, output = self.link.run("sh", "-c", 'cat > "$0"', path, stdin=after)
                failure = output.decode(errors="replace") if code else ""
        if failure:
            return FileEditorObservation.from_text(failure, command=action.command, is_error=True)
        return FileEditorObservation.model_validate_json(text.replace(self.root, ""))

    def _fetch(self, path: str, local: Path) -> str:
        shutil.rmtree(self.root, ignore_errors=True)
        code, data = self.link.run("sh", "-c", FETCH, path)
        text = data.decode(errors="replace")
        if code in (0, 3, 4):
            local.parent.mkdir(parents=True, exist_ok=True)
        if code == 0:
            local.write_bytes(data)
        if code == 3:
            local.mkdir(exist_ok=True)
            for name in sorted(text.split("\0")):  # a folder before what it holds
                if not {"", ".", ".."} & {*name.removesuffix("/").split("/")}:  # who knows who says
                    (local / name).mkdir() if name.endswith("/") else (local / name).touch()
        return "" if code in (0, 3, 4, 5) else f"{path} cannot be read: {text.strip()}"


class SandboxEditorTool(FileEditorTool):
    @classmethod
    def create(cls, conv_state):
        link = LINKS[conv_state.workspace.working_dir]
        # The description names the sandbox's folder: it is the same for every trial.
        workspace = SimpleNamespace(working_dir=link.job["workdir"])
        state = SimpleNamespace(workspace=workspace, agent=conv_state.agent)
        (tool,) = FileEditorTool.create(state)
        return [tool.set_executor(Editor(link))]


# Not by a subclass of LLM, whose calls the SDK does not count.
HERE, complete = threading.local(), LLM.completion


def asking(llm: LLM, *args, **kwargs):
    HERE.link.call("asking")
    return complete(llm, *args, **kwargs)


def make_agent(job: dict) -> Agent:
    model, size = job["model"], job["condenser_events"]
    sampling = {"temperature": model["temperature"], "seed": model["seed"]}
    sampling |= {"max_output_tokens": model["max_tokens"], "num_retries": 5}
    sampling["litellm_extra_body"] = model["sampling"]
    key = SecretStr(model["api_key"] or "none")
    service = {"model": f"openai/{model['name']}", "base_url": job["base_url"], "api_key": key}
    service |= {"timeout": int(model["timeout_sec"]), "retry_min_wait": 1, "api_mode": "chat"}
    form = {"caching_prompt": False, "disable_vision": True, "force_string_serializer": True}
    # Every model is taken for one with a reasoning effort, which drops the sampling parameters.
    knows = {"supports_reasoning_effort": False, "supports_sampling_params": True}
    llm = LLM(usage_id="agent", **service, **sampling, **form, capability_overrides=knows)
    summariser = llm.model_copy(update={"usage_id": "condenser"})
    condenser = LLMSummarizingCondenser(llm=summariser, max_size=size) if size else None
    tools = [Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)]
    prompt = {"cli_mode": True, "soul_content": ""}
    return Agent(llm=llm, tools=tools, condenser=condenser, system_prompt_kwargs=prompt)


def work(link: Link) -> dict:
    facts, last = {"turns": 0, "nudges": 0, "condensations": 0}, [None]
    agent, folder, HERE.link = make_agent(link.job), tempfile.mkdtemp(), link

    def on_event(event) -> None:
        facts["condensations"] += isinstance(event, Condensation)
        if isinstance(event, LLMConvertibleEvent):
            turn = getattr(event, "llm_response_id", None)
            again = turn is not None and turn == last[0]
            facts["turns"] += turn is not None and not again
            last[0] = turn
            (message,) = agent.llm.format_messages_for_llm([event.to_llm_message()])
            told = {} if turn is None else counted()
            link.call("message", message=message, again=again, facts=told)

    def counted() -> dict:
        replies = conversation.conversation_stats.get_combined_metrics().response_latencies
        return {**facts, "model_calls": len(replies)}

    LINKS[folder] = link
    options = {"workspace": folder, "callbacks": [on_event], "visualizer": None}
    conversation = Conversation(agent, **options, stuck_detection=link.job["stuck_detector"])
    link.on_close = conversation.pause
    try:
        result = {"stop": converse(conversation, link.job, facts)}
    except ConversationRunError as error:
        cause = error.original_exception
        raise cause from cause.__cause__
    finally:
        del LINKS[folder]
    return {**result, "facts": counted()}


def converse(conversation: Conversation, job: dict, facts: dict) -> str:
    conversation.send_message(job["instruction"])
    while True:
        conversation.max_iteration_per_run = job["max_turns"] - facts["turns"]
        conversation.run()
        status = conversation.state.execution_status.value
        kinds = ActionEvent | MessageEvent | ConversationErrorEvent
        *_, event = (e for e in conversation.state.events if isinstance(e, kinds))
        if status == "error" and getattr(event, "code", "") == "MaxIterationsReached":
            return "max_turns"
        if status != "finished" or isinstance(event, ActionEvent):
            return {"finished": "finished", "stuck": "stuck", "paused": "cancelled"}[status]
        if facts["nudges"] == job["nudges"]:
            return "plain_text"
        if facts["turns"] == job["max_turns"]:
            return "max_turns"
        facts["nudges"] += 1
        conversation.send_message(NUDGE)


if __name__ == "__main__":
    LLM.completion = asking
    impl.create_terminal_session = create_terminal_session
    impl._is_tmux_available = lambda: False  # its terminals would run on this machine
    register_tool(FileEditorTool.name, SandboxEditorTool)
    serve(work)
