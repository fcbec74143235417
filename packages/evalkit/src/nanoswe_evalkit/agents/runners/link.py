"""The runner's side of a trial: a unix socket over which its tools act in the harness's sandbox.

In: the path of a socket to listen on; each connection is a trial, and its first line says what to
do. Out: one JSON request at a time (`run`, `terminal`, `message`), last `end`. When a connection
closes the trial is over and its agent is told to stop; when stdin ends the harness is gone.
Run by a Python of its own: only the standard library here, and nothing of ours.
"""

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class Link:
    """One trial. `on_close` may be set to what stops its agent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file, self.lock = sock, sock.makefile("rwb"), threading.Lock()
        self.on_close: Callable[[], Any] = lambda: None
        self.job: dict[str, Any] = json.loads(self.file.readline())
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        poll.poll()
        self.on_close()

    def call(self, op: str, **fields: Any) -> Any:
        with self.lock:
            self.file.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self.file.flush()
            fds = socket.recv_fds(self.sock, 1, 1)[1] if op == "terminal" else None
            answer = json.loads(self.file.readline())
            return fds[0] if fds else answer

    def run(self, *argv: str, stdin: bytes = b"") -> tuple[int, bytes, bool]:
        """(exit code, output, was it cut off?) of a command; bytes travel as latin-1 text."""
        code, output, late = self.call("run", argv=argv, stdin=stdin.decode("latin-1"))
        return code, output.encode("latin-1"), late


def serve(work: Callable[[Link], dict[str, Any]]) -> None:
    """Answer each trial's `end` with what `work` returns: `stop` or `error`, and facts."""

    def trial(sock: socket.socket) -> None:
        link = Link(sock)
        try:
            result = work(link)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        with sock, suppress(OSError, ValueError):  # the harness may have ended the trial before
            link.call("end", **result)

    def orphaned() -> None:
        sys.stdin.read()
        os._exit(0)

    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{sys.argv[1]}.new")
    server.listen(1024)
    Path(f"{sys.argv[1]}.new").rename(sys.argv[1])  # when it is there it answers
    threading.Thread(target=orphaned, daemon=True).start()
    while True:
        threading.Thread(target=trial, args=(server.accept()[0],), daemon=True).start()
