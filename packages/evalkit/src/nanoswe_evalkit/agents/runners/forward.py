# mypy: ignore-errors
# ruff: noqa: UP032, PTH123  (this file runs in the sandboxes' Pythons)
"""Runs inside a sandbox beside an agent that lives there: its way to the model, and no other.

In: a shell command; on stdin, a terminal, JSON lines that answer requests. Out: on stdout requests
as JSON lines, last how the command ended. The command finds an OpenAI and an Anthropic service on
127.0.0.1, whose every request goes to the harness. Standard library only; for Python 3.6 and newer.
"""

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import tty
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn

lock, ids, answers = threading.Lock(), itertools.count(), {}


def say(**message):
    data = json.dumps(message).encode() + b"\n"
    with lock:
        while data:
            data = data[os.write(1, data) :]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        number, size = next(ids), int(self.headers.get("content-length") or 0)
        answers[number] = queue.Queue()
        body = self.rfile.read(size).decode("utf-8", "replace")
        say(id=number, method=self.command, path=self.path, body=body)
        answer = answers[number].get()
        self.send_response(answer["status"])
        self.send_header("content-type", answer["type"])
        self.end_headers()
        self.wfile.write(answer["body"].encode())

    do_GET = do_POST

    def log_message(self, *args):
        pass


class Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True


def work(port, command):
    root = "http://127.0.0.1:{}".format(port)
    env = dict(os.environ, OPENAI_BASE_URL=root + "/v1", ANTHROPIC_BASE_URL=root)
    env.update(OPENAI_API_KEY="none", ANTHROPIC_API_KEY="none")
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": env}
    with open("/tmp/agent.log", "w+b") as log:
        code = subprocess.call(["bash", "-c", command], stdout=log, **options)
        log.seek(max(0, log.seek(0, 2) - 20000))
        say(exit=code, output=log.read().decode("utf-8", "replace"))


if __name__ == "__main__":
    stdin = os.fdopen(0, "rb")
    stdin.readline()
    tty.setraw(0)
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=work, args=(server.server_port, sys.argv[1]), daemon=True).start()
    for line in stdin:
        message = json.loads(line.decode())
        answers[message["id"]].put(message)
