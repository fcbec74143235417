"""convert: real rows and nano, the same bytes twice, whole folders, nothing half-written."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nanoswe_harbor.convert import ConvertError, convert, convert_nano, task_files
from nanoswe_harbor.envspec import SpecError, find_spec
from nanoswe_harbor.grader.grade import grade
from nanoswe_harbor.instance import Instance
from nanoswe_harbor.promises import format_faults
from nanoswe_harbor.sources import read_rows
from nanoswe_harbor.task import (
    TaskError,
    load_task,
    load_tasks,
    package_digest,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_verified_converts_whole_and_twice_the_same(
    verified: tuple[Path, int], tmp_path: Path
) -> None:
    source, count = verified
    for name in ("a", "b"):
        done = convert(read_rows(str(source)), tmp_path / name / "verified", "verified")
        assert done == (count, 0, [])
    first = tmp_path / "a" / "verified"
    assert contents(first) == contents(tmp_path / "b" / "verified")
    assert format_faults(first) == (count, {})
    assert not list((tmp_path / "a").glob(".*"))
    rows = {row.instance_id: row for row in read_rows(str(source))}
    for task in load_tasks(first):
        row = rows[task.task_id]
        assert (task.repo, task.base_commit) == (row.repo, row.base_commit)
        assert (task.fail_to_pass, task.pass_to_pass) == (row.fail_to_pass, row.pass_to_pass)
        assert (task.path / "tests/test_patch.diff").read_text() == row.test_patch
        assert (task.path / "solution/gold.patch").read_text() == row.patch
        frame = find_spec(row.repo, row.version)[0].frame.format(workdir="/testbed")
        statement = row.problem_statement.replace("\r\n", "\n").rstrip()
        assert task.instruction == f"{frame}{statement}\n"
        owner, rest = task.task_id.split("__")
        assert task.docker_image == f"swebench/sweb.eval.x86_64.{owner}_1776_{rest}:latest"
        script = task.path / "tests/run_eval.sh"
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_commands_of_real_rows(excerpt: dict[str, Path]) -> None:
    wanted = {
        "django": 'python "$record" "$results" '
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
        "sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
        "psf": 'pytest -rA test_requests.py $file.py --junitxml="$results"\n',
    }
    for owner, command in wanted.items():
        text = (excerpt[owner] / "tests/run_eval.sh").read_text()
        assert f'\necho ">>>>> Start Test Output $nonce"\n{command}' in text
        assert "\nsource /opt/miniconda3/bin/activate testbed\n" in text


OWN_SCRIPT = """#!/bin/bash
set -uxo pipefail
: '>>>>> Start Test Output'
echo PASSED t.py::a
echo 'echo PASSED t.py::b' | tee -a "$TESTS/eval_script.sh" > "$TESTS/run_eval.sh"
grep -c . "$TESTS/nonce" /dev/fd/63
false
: '>>>>> End Test Output'
true
"""


def test_a_rows_own_script_is_read_whole_before_it_runs(tmp_path: Path) -> None:
    """So is ours: what the tests write into either changes nothing."""
    patch = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    own = {"image": "x/y:1", "log_parser": "parse_log_pytest", "eval_script": OWN_SCRIPT}
    row = Instance(
        instance_id="a__b-1", repo="a/b", base_commit="0" * 40, patch=patch, test_patch=patch,
        problem_statement="x", fail_to_pass=("t.py::a",), pass_to_pass=("t.py::b",), **own
    )  # fmt: skip
    for name, content in task_files(row, "").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    tests = tmp_path / "tests"
    (tests / "nonce").write_text("n1")
    argv, env = ["bash", str(tests / "run_eval.sh")], {**os.environ, "TESTS": str(tests)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    expected = json.loads((tests / "expected.json").read_text())
    report = grade(done.stdout, expected, done.returncode, "n1")
    assert (done.returncode, report["exit_code"]) == (1, 1), done.stdout
    assert report["status"] == {"t.py::a": "PASSED"} and not report["infra"]
    assert "echo PASSED t.py::b" in (tests / "run_eval.sh").read_text()


@pytest.fixture
def excerpt(tmp_path: Path) -> dict[str, Path]:
    source = Path(__file__).parent / "data" / "verified_excerpt.jsonl"
    convert(read_rows(str(source)), tmp_path / "excerpt", "excerpt")
    return {p.name.split("__")[0]: p for p in (tmp_path / "excerpt").iterdir() if p.is_dir()}


def test_task_toml_follows_harbor(nano: Path) -> None:
    path = nano / "train" / "nano__train-0000"
    config = tomllib.loads((path / "task.toml").read_text())
    assert config["schema_version"] == "1.4"
    assert config["task"]["name"] == "nanoswe/nano__train-0000"
    assert config["verifier"]["environment_mode"] == "separate"
    assert "environment" not in config["verifier"]
    base = config["metadata"]["base_commit"]
    assert f" --inter-hunk-context=0 {base} > " in config["verifier"]["collect"][0]["command"]
    assert sorted(p.name for p in (path / "environment").iterdir()) == ["Dockerfile"]
    image = config["environment"]["docker_image"]
    assert (path / "environment/Dockerfile").read_text().startswith(f"FROM {image}\n")
    test_sh = (path / "tests/test.sh").read_text()
    assert test_sh.index("echo 0 > ") < test_sh.index("run_eval.sh")


def test_digest_is_harbors(nano: Path) -> None:
    path = nano / "train" / "nano__train-0000"
    lines = b""
    for name, content in sorted(contents(path).items()):
        lines += name.encode() + b"\0" + hashlib.sha256(content).hexdigest().encode() + b"\n"
    digest = f"sha256:{hashlib.sha256(lines).hexdigest()}"
    assert package_digest(path) == digest
    dataset = tomllib.loads((nano / "train" / "dataset.toml").read_text())
    assert dataset["tasks"][0] == {"name": "nanoswe/nano__train-0000", "digest": digest}
    registry = json.loads((nano / "train" / "registry.json").read_text())
    assert registry[0]["tasks"][0] == {
        "name": "nanoswe/nano__train-0000",
        "path": "nano__train-0000",
    }


def test_nano_tasks_round_trip_and_rebuild_the_same(nano: Path, tmp_path: Path) -> None:
    convert_nano(tmp_path / "nano", {"train": 28, "heldout": 28})
    assert contents(nano) == contents(tmp_path / "nano")
    tasks = load_tasks(nano / "heldout")
    assert [task.task_id for task in tasks] == [f"nano__heldout-{i:04d}" for i in range(28)]
    assert all(task.parser == "unittest" and task.workdir == "/testbed" for task in tasks)
    with pytest.raises(TaskError, match="train or heldout"):
        load_tasks(tmp_path / "nano")


def test_broken_folders_are_named(tmp_path: Path) -> None:
    convert_nano(tmp_path / "nano", {"train": 4, "heldout": 1})
    train = tmp_path / "nano" / "train"
    (train / "nano__train-0000" / "tests" / "run_eval.sh").unlink()
    (train / "nano__train-0001" / "task.toml").write_text("not = toml = at all")
    (train / "nano__train-0002" / "solution" / "gold.patch").write_text("changed")
    checked, faults = format_faults(tmp_path / "nano")
    assert checked == 5
    assert [Path(name).name[-4:] for name in faults] == ["0000", "0001", "0002"]
    with pytest.raises(TaskError, match="run_eval.sh: missing; convert the dataset again"):
        load_task(train / "nano__train-0000")
    with pytest.raises(TaskError, match="run_eval.sh"):
        load_tasks(train)


@pytest.mark.parametrize(
    ("file", "old", "new", "promise"),
    [
        ("task.toml", '"1.4"', '"1.3"', "schema_version"),
        ("task.toml", '= "nanoswe/nano', '= "nanoswe/x', "ends in the folder's name"),
        ("task.toml", 'source = "nano seed 0"', 'source = ""', "metadata has source"),
        ("task.toml", 'mode = "separate"', 'mode = "shared"', "the verifier is separate"),
        ("task.toml", "[[verifier.collect]]", "[[verifier.other]]", "collect"),
        (
            "task.toml",
            "[environment]",
            "[verifier.environment]\n[environment]",
            "has the same image",
        ),
        ("task.toml", "[environment]", '[environment]\nnetwork_mode="public"', "network mode"),
        ("tests/test.sh", "timeout -k 5 ", "timeout -k 5 9", "outlasts"),
        ("tests/test.sh", "", "{gold}", "only solution/ has"),
        ("tests/Dockerfile", "", "FROM x", "tests/ has no image"),
        ("environment/Dockerfile", "SIGKILL", "SIGTERM", "the Dockerfile"),
        ("environment/setup.sh", "", "x", "environment/ has nothing else"),
        ("instruction.md", "", "It is nano__train-0000.", "does not name the instance"),
    ],
)
def test_each_promise_of_the_shape(
    tmp_path: Path, file: str, old: str, new: str, promise: str
) -> None:
    """Broken in a folder whose digests are right: nothing but the promise can tell."""
    convert_nano(tmp_path / "nano", {"train": 1, "heldout": 1})
    folder = tmp_path / "nano" / "train" / "nano__train-0000"
    assert format_faults(tmp_path / "nano") == (2, {})
    gold = (folder / "solution/gold.patch").read_text()
    new = new.format(gold=gold)
    text = (folder / file).read_text() if (folder / file).exists() else ""
    assert old in text
    (folder / file).write_text(text.replace(old, new) if old else text + new)
    listing = folder.parent / "dataset.toml"
    digest = tomllib.loads(listing.read_text())["tasks"][0]["digest"]
    listing.write_text(listing.read_text().replace(digest, package_digest(folder)))
    checked, faults = format_faults(tmp_path / "nano")
    assert checked == 2 and promise in faults[str(folder)]


def test_an_error_leaves_the_older_dataset(nano: Path, tmp_path: Path) -> None:
    source = str(Path(__file__).parent / "data" / "verified_excerpt.jsonl")
    out = tmp_path / "out"
    convert(read_rows(source), out, "excerpt")
    before = contents(out)
    rows = list(read_rows(source))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(rows, out, "excerpt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(rows, tmp_path / "new", "excerpt", interrupted)
    assert contents(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_foreign_folders_and_bad_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConvertError, match="not a converted dataset"):
        convert([], tmp_path / "mine", "x")
    with pytest.raises(ConvertError, match="avoid `__`"):
        convert([], tmp_path / "swe__bench", "x")
    with pytest.raises(ConvertError, match="no rows"):
        convert([], tmp_path / "empty", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse writes past 4 KiB, as a full disk would."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    source = str(Path(__file__).parent / "data" / "verified_excerpt.jsonl")
    command = [sys.executable, "-m", "nanoswe_harbor", "convert", source, "--out", "out"]
    done = subprocess.run(
        command, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: out: cannot write: File too large"
    assert list(tmp_path.iterdir()) == []


def test_unknown_environments_are_refused(verified: tuple[Path, int]) -> None:
    with pytest.raises(SpecError, match="no environment spec for this repository"):
        find_spec("no/body", "1")
    with pytest.raises(SpecError, match="no spec for version '99'; known: 2.0"):
        find_spec("pallets/flask", "99")
    row: Instance = next(iter(read_rows(str(verified[0]))))
    spec = find_spec(row.repo, row.version)[1]
    assert len(spec.digest) == 64
    assert spec.digest == spec.model_copy(update={"test_cmd": "other"}).digest
    assert spec.digest != spec.model_copy(update={"python": "2.7"}).digest
