"""The commands as a user runs them, and the weight of the import."""

import json
import signal
import subprocess
import sys

import httpx
import pyarrow.parquet

from nanoswe_proxy.trajectory import read_jsonl

WRONG_NUMBERS = [
    ("--max-calls", "0"), ("--max-calls", "-1"), ("--max-sessions", "0"), ("--port", "70000"),
    ("--max-tokens", "0"), ("--temperature", "-1"), ("--temperature", "inf"),
]  # fmt: skip
COMMAND = [sys.executable, "-c", "from nanoswe_proxy.cli import main; main()"]


def test_serve_seal_export(folders, tmp_path):
    script, kept = tmp_path / "replies.json", tmp_path / "trajectories.jsonl"
    script.write_text(json.dumps(["left", {"text": "right", "close": True}]))
    options = ["--engine", f"scripted:{script}", "--tokenizer", folders["words"], "--port", "0"]
    command = [*COMMAND, "serve", *options, "--trajectories", kept, "--logs", tmp_path / "logs"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        url = server.stderr.readline().split()[-1]
        facts = json.loads(server.stderr.readline().removeprefix("engine: "))
        assert httpx.get(facts.pop("health")).json()["open_sessions"] == 0
        assert facts == json.loads((tmp_path / "logs/engine.json").read_text())
        assert facts["engine"] == "ScriptedEngine" and facts["witnesses"] > 0
        session = httpx.post(f"{url}/sessions", json={"trial_id": "t.0"}).json()
        messages = [{"role": "user", "content": "go"}]
        answer = httpx.post(f"{session['base_url']}/chat/completions", json={"messages": messages})
        assert answer.json()["choices"][0]["message"]["content"] == "left"
        httpx.post(f"{url}/sessions/{session['cap']}/seal").raise_for_status()
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
    (trajectory,) = read_jsonl(kept)
    run = subprocess.run(
        [*COMMAND, "export", kept, "--json"], capture_output=True, text=True, check=True
    )
    row = json.loads(run.stdout)
    assert tuple(row["tokens"]) == trajectory.samples[0].tokens and row["trial_id"] == "t.0"
    table = subprocess.run([*COMMAND, "export", kept], capture_output=True, text=True, check=True)
    columns, empty = tmp_path / "rows.parquet", tmp_path / "empty.jsonl"
    empty.write_text("")
    for file, most in ((empty, 0), (kept, 1)):
        subprocess.run([*COMMAND, "export", file, "--parquet", columns], check=True)
        with pyarrow.parquet.ParquetFile(columns) as written:
            rows = written.read().to_pylist()
        assert len(rows) == most
    assert rows[0].pop("stops") == json.dumps(row.pop("stops")) and rows == [row]
    nowhere = tmp_path / "no/rows.parquet"
    run = subprocess.run([*COMMAND, "export", kept, "--parquet", nowhere], capture_output=True)
    assert run.returncode == 2 and run.stderr.count(b"\n") == 1 and b"no/rows" in run.stderr
    head, row = table.stdout.splitlines()
    assert head.split()[:4] == ["trial", "try", "sample", "tokens"]
    assert row.split() == [
        "t.0",
        "0",
        "0",
        str(len(trajectory.samples[0].tokens)),
        "2",
        "1",
        "stop",
    ]


def test_wrong_input_is_one_line_and_code_2(folders, tmp_path):
    script = tmp_path / "replies.json"
    script.write_text('["left"]')
    for options, says in (
        (["--engine", "nothing:x", "--tokenizer", folders["words"]], "nothing"),
        (["--engine", "scripted:/nowhere", "--tokenizer", folders["words"]], "/nowhere"),
        (["--engine", "scripted:x", "--tokenizer", tmp_path], "tokenizer.json is missing"),
        (["--tokenizer", tmp_path], "--engine"),
        (
            [
                "--engine",
                f"scripted:{script}",
                "--tokenizer",
                folders["words"],
                "--trajectories",
                tmp_path / "no" / "t.jsonl",
            ],
            "no/t.jsonl",
        ),
        *(
            (["--engine", "scripted:x", "--tokenizer", tmp_path, *wrong], wrong[0])
            for wrong in WRONG_NUMBERS
        ),
    ):
        run = subprocess.run([*COMMAND, "serve", *options], capture_output=True, text=True)
        assert run.returncode == 2 and run.stdout == ""
        assert says in run.stderr and run.stderr.count("\n") == 1


def test_import_is_light():
    """In seconds of CPU, the interpreter's own with it; the first time, modules may be compiled."""
    code = "import nanoswe_proxy, time; print(time.process_time())"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert float(done.stdout) < 0.5
