# mypy: ignore-errors
"""A runner's end of the wire to the harness: a unix socket, a connection a trial, JSON lines.

In: the socket's path, and a function that works on a trial: `work(link) -> dict`. Out: one request
at a time (`run`, `terminal`, `message`), last `end` with that dict, or with what failed. When a
connection closes, its agent stops; when stdin ends, we do. Standard library only; nothing of ours.
"""

import json
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path


def start(function, *args) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


class Link:  # one trial's connection; `on_close` stops its agent
    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file, self.lock = sock, sock.makefile("rwb"), threading.Lock()
        self.on_close = lambda: None
        self.job = json.loads(self.file.readline())
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        start(lambda: (poll.poll(), self.on_close()))

    def call(self, op: str, **fields):
        with self.lock:
            self.file.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self.file.flush()
            fds = socket.recv_fds(self.sock, 1, 1)[1] if op == "terminal" else None
            answer = json.loads(self.file.readline())
            return fds[0] if fds else answer

    def run(self, *argv: str, stdin: bytes = b"") -> tuple[int, bytes]:
        code, output = self.call("run", argv=argv, stdin=stdin.decode("latin-1"))
        return code, output.encode("latin-1")


def serve(work) -> None:
    """Until stdin ends; the socket's path is our only argument."""
    path, server = sys.argv[1], socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen(1024)
    Path(f"{path}.new").rename(path)  # when it is there it answers
    start(lambda: (sys.stdin.read(), os._exit(0)))
    while True:
        start(_trial, server.accept()[0], work)


def _trial(sock: socket.socket, work) -> None:
    link = Link(sock)
    try:
        result = work(link)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        status = getattr(error, "status_code", 0) or getattr(error.__cause__, "status_code", 0)
        result = {"error": text, "status": status or 0}
    with sock, suppress(OSError, ValueError):  # the harness may have ended the trial before
        link.call("end", **result)
