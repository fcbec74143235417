"""`serve --workers 2`, with real processes: sessions in turn, a worker for each by its URL, what
concerns all to all, and a worker that is killed and takes up its sessions again.
"""

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
from test_cli import COMMAND

from nanoswe_proxy.trajectory import from_json, read_jsonl

USER = [{"role": "user", "content": "go"}]
NEXT = [{"role": "user", "content": "again"}]  # another body: else the same reply may be sent again


@contextmanager
def front(folder, tmp_path, *options, key=""):
    script = tmp_path / "replies.json"
    script.write_text(json.dumps(["left", "right", "sum", "of"]))
    command = [*COMMAND, "serve", "--engine", f"scripted:{script}", "--tokenizer", folder, "--port",
               "0", "--workers", "2", "--logs", tmp_path / "logs", "--trajectories",
               tmp_path / "kept.jsonl", *options]  # fmt: skip
    env = os.environ | ({"NANOSWE_ADMIN_KEY": key} if key else {})
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        lines = []
        try:
            while not (lines and lines[-1].startswith("workers:")):
                lines.append(server.stderr.readline())
                assert lines[-1], lines
            url = next(line.split()[-1] for line in lines if line.startswith("listening"))
            known = json.loads(lines[-1].removeprefix("workers: "))
            threading.Thread(target=lambda: lines.extend(server.stderr), daemon=True).start()
            yield url, known, server, lines
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0


def say(base, messages=USER):
    answer = httpx.post(f"{base}/chat/completions", json={"messages": messages}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid):
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True


def test_two_workers(folders, tmp_path):
    with front(folders["words"], tmp_path, key="k") as (url, known, *_):
        bearer = {"authorization": "Bearer k"}
        with httpx.Client(base_url=url, headers=bearer, timeout=60) as admin:
            assert httpx.post(f"{url}/sessions", json={"trial_id": "x"}).status_code == 401
            opened = [admin.post("/sessions", json={"trial_id": f"t.{n}"}).json() for n in range(4)]
            caps, bases = [o["cap"] for o in opened], [o["base_url"] for o in opened]
            homes = [base.partition("/s/")[0] for base in bases]
            assert sorted(homes) == sorted(known["workers"] * 2)
            for base in bases:
                assert say(base)["content"] == "left"
            # the wrong worker, and the front, say so, and nothing happens
            other = next(w for w in known["workers"] if w != homes[0])
            for wrong in (other, url):
                path = f"{wrong}/s/{caps[0]}/v1/chat/completions"
                refused = httpx.post(path, json={"messages": USER})
                assert refused.status_code == 421
                assert refused.json()["error"]["code"] == "wrong_worker"
                by_key = {"authorization": f"Bearer {caps[0]}"}
                refused = httpx.post(f"{wrong}/v1/chat/completions", json={}, headers=by_key)
                assert refused.status_code == 421
            assert homes[0] in refused.json()["error"]["message"]
            for nobody in ("none", "w7-x", "w99999999999999999999-x", ""):
                assert admin.get(f"/sessions/{nobody or 'w'}").status_code == 404
            assert admin.get(f"/s/{caps[0]}/view").headers["content-type"].startswith("text/html")
            assert admin.post(f"/sessions/{caps[0]}/annotate", json={"reward": 1}).json()
            health = admin.get("/healthz").json()
            assert (health["status"], health["open_sessions"]) == ("ok", 4)
            assert httpx.get(known["health"]).json() == health
            metrics = admin.get("/metrics").text
            assert "nanoswe_proxy_calls_total 4\n" in metrics
            assert "nanoswe_proxy_open_sessions 4\n" in metrics
            # paused and resumed together
            assert httpx.post(f"{url}/pause").status_code == 401
            assert admin.post("/pause").json() == {"paused": True}
            told, waiting = [], []
            for base in bases[:2]:
                waiting.append(threading.Thread(target=lambda b=base: told.append(say(b, NEXT))))
                waiting[-1].start()
            time.sleep(0.5)
            assert not told
            assert admin.post("/resume", json={"version": 5}).status_code == 400
            assert admin.post("/resume", json={"version": 0}).json() == {
                "paused": False,
                "version": 0,
            }
            for thread in waiting:
                thread.join(30)
            assert len(told) == 2
            sealed = [from_json(admin.post(f"/sessions/{cap}/seal").text) for cap in caps]
            assert [len(t.turns) for t in sealed] == [2, 2, 1, 1] and sealed[0].notes == {
                "reward": 1
            }
            assert {t.trial_id for t in read_jsonl(tmp_path / "kept.jsonl")} == {
                f"t.{n}" for n in range(4)
            }


def test_a_worker_that_is_killed_takes_up_its_sessions(folders, tmp_path):
    with front(folders["words"], tmp_path) as (url, _, server, lines):
        opened = [httpx.post(f"{url}/sessions", json={"trial_id": f"t.{n}"}).json() for n in (0, 1)]
        bases = [o["base_url"] for o in opened]
        first = [say(base) for base in bases]
        old = children(server.pid)
        assert len(old) == 2
        os.kill(old[0], signal.SIGKILL)
        wired = [*USER, first[0], {"role": "user", "content": "on"}]
        after = [say(base, wired) for base in bases]  # the socket waits for the next one
        assert all(after) and old[1] in children(server.pid) and len(children(server.pid)) == 2
        for session in opened:
            trajectory = from_json(httpx.post(f"{url}/sessions/{session['cap']}/seal").text)
            assert [t.fork for t in trajectory.turns] == ["", ""]
            assert trajectory.conservation.trained == trajectory.conservation.sampled
        assert any("ended with code -9, and starts again" in line for line in lines)
        workers = children(server.pid)
    deadline = time.monotonic() + 10
    while not all(map(gone, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(map(gone, workers))


def test_workers_end_with_their_parent(folders, tmp_path):
    script = tmp_path / "replies.json"
    script.write_text('["left"]')
    command = [*COMMAND, "serve", "--engine", f"scripted:{script}", "--tokenizer", folders["words"],
               "--port", "0", "--workers", "2"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        while not server.stderr.readline().startswith("workers:"):
            pass
        workers = children(server.pid)
        server.kill()
        deadline = time.monotonic() + 15
        while not all(map(gone, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(workers) == 2 and all(map(gone, workers))


def test_workers_that_cannot_start(tmp_path):
    command = [*COMMAND, "serve", "--engine", "scripted:/nowhere", "--tokenizer", tmp_path,
               "--port", "0", "--workers", "2"]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "worker 0 ended with code 2" in run.stderr
    assert run.stderr.count("\n") == 2 and "Traceback" not in run.stderr
