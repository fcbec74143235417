"""docker/: each image keeps what it promises, and what the images below it promise; no network."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanoswe_harbor.convert import convert
from nanoswe_harbor.images import plan
from nanoswe_harbor.sources import read_rows
from nanoswe_harbor.task import load_task, load_tasks

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[3]
EXCERPT = Path(__file__).parent / "data" / "verified_excerpt.jsonl"
BESIDE = Path(sys.base_prefix).parent  # where pyenv has other versions; elsewhere they are fetched
MINORS = ("3.8", "3.9", "3.11", "3.12")
CLI = [sys.executable, "-m", "nanoswe_harbor"]
PARENTS = {
    "base": None, "env": "base", "task": "env", "proxy": "base", "evalkit": "base", "agent": "base"
}  # fmt: skip
CEILING_MIB = {"base": 350, "env": 700, "task": 700, "proxy": 600, "evalkit": 600, "agent": 1200}
ENVS = {  # (source, alias) → Python
    ("nano", "nano__all-1"): "3.11",
    ("verified", "psf__requests-2.26"): "3.9",
    ("verified", "django__django-4.0"): "3.8",
}


def command(*argv: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        argv,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "BUILDX_BAKE_ENTITLEMENTS_FS": "0", **(env or {})},
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def inside(image: str, script: str, user: str = "1000") -> str:
    """Output of a script in a fresh container without a network, as an ordinary user."""
    options = ("--rm", "--network=none", f"--user={user}", "--env=HOME=/tmp")
    return command("docker", "run", *options, image, "bash", "-ec", script).strip()


def check_base(image: str) -> None:
    config = json.loads(
        command("docker", "image", "inspect", "--format", "{{json .Config}}", image)
    )
    assert not config.get("Entrypoint") and config["StopSignal"] == "SIGKILL"
    assert inside(image, "git --version; tar --version; patch --version; bash --version")
    for left in ("/var/lib/apt/lists", "/run/secrets", "/root"):
        assert inside(image, f"ls {left} || true", user="0") == "", left
    assert inside(image, "find / -xdev -path '*/.cache/*' -print -quit", user="0") == ""


def check_env(image: str) -> None:
    where = "/opt/miniconda3/envs/testbed/bin/python"
    assert inside(image, "command -v python") == where
    for activate in ("source /opt/miniconda3/bin/activate testbed", "PATH=/usr/bin:/bin; source "
                     "/opt/miniconda3/bin/activate; conda activate testbed"):  # fmt: skip
        assert inside(image, f"set -u; {activate}; command -v python") == where
    assert inside(image, "conda run -n testbed python -c 'print(40 + 2)'") == "42"
    assert (
        inside(image, "env | grep ^PIP_NO_INDEX; ls -d /opt/wheels").split("\n")[1] == "/opt/wheels"
    )
    # a link to the python finds the same packages, as under `tox --current-env`
    linked = "ln -s $(command -v python) /tmp/linked; /tmp/linked -m pip --version"
    assert inside(image, linked) == inside(image, "python -m pip --version")
    # a package's own build, as an official evaluation script asks for it, as any user
    made = 'mkdir /tmp/p; cd /tmp/p; echo \'from setuptools import setup; setup(name="zzz", '
    made += 'version="1", py_modules=["zzz"])\' > setup.py; echo \'x = 7\' > zzz.py; '
    made += "python -m pip install -q . >&2 || exec echo failed; cd /; "
    installed = inside(image, made + "python -c 'import zzz; print(zzz.x)'")
    # nano's projects are not installed, so there is nothing to build them with
    assert installed == ("7" if inside(image, "ls /opt/wheels") else "failed")
    # a reinstall that cannot work says so
    failed = inside(image, "python -m pip install -q no-such-thing-as-this || echo failed")
    assert failed.endswith("failed")


def check_proxy(image: str) -> None:
    assert "serve" in inside(image, "nanoswe-proxy --help")


def check_evalkit(image: str) -> None:
    assert "verify" in inside(image, "nanoswe-evalkit --help")


def check_agent(image: str) -> None:
    """Its own Python, the pinned SDK, nothing of ours; importing it asks for no network."""
    assert inside(image, "python --version").startswith("Python 3.12.")
    pins = (ROOT / "docker/agent/requirements.txt").read_text().split()
    found = inside(image, "pip list --format freeze").split()
    assert {pin for pin in pins if "==" in pin} <= {*found}
    assert not [name for name in found if name.startswith("nanoswe")]
    # all that the runner imports, which is mounted when it is used
    link = "packages/evalkit/src/nanoswe_evalkit/agents/runners/run_openhands.py"
    lines = (ROOT / link).read_text().splitlines()
    imports = [line for line in lines if line.startswith("from openhands.")]
    assert len(imports) > 10
    inside(image, f"python -c {shlex.quote('; '.join(imports))}")


def check_task(image: str) -> None:
    """A clean tree on `main` at the base commit, which is all that its object store reaches."""
    asked = "cd /testbed; git status --porcelain; git branch --show-current; git remote; git reflog"
    assert inside(image, asked).split() == ["main"]
    alone = "git rev-list --all --count; git rev-list HEAD --count; git for-each-ref refs/heads"
    every, reached, *heads = inside(image, alone).splitlines()
    assert every == reached and len(heads) == 1
    assert inside(image, "touch /testbed/x; ls /testbed/x") == "/testbed/x"


CHECKS: dict[str, Callable[[str], None]] = {
    "base": check_base, "env": check_env, "task": check_task, "proxy": check_proxy,
    "evalkit": check_evalkit, "agent": check_agent,
}  # fmt: skip


def check(kind: str, image: str) -> None:
    """A child passes its parents' checks."""
    size = int(command("docker", "image", "inspect", "--format", "{{.Size}}", image))
    assert size < CEILING_MIB[kind] * 2**20, f"{image}: {size / 2**20:.0f} MiB"
    above: str | None = kind
    while above:
        CHECKS[above](image)
        above = PARENTS[above]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """This machine's CPythons without their packages, of which it may have a gigabyte."""
    found = {minor: [*BESIDE.glob(f"{minor}.*/bin/python3")] for minor in MINORS}
    if not all(found.values()):
        return None
    folder = tmp_path_factory.mktemp("pythons")

    def ignored(path: str, names: list[str]) -> list[str]:
        packages = names if Path(path).name == "site-packages" else []
        return [*packages, *({"__pycache__", "share", "test"} & {*names})]

    for minor, (python, *_) in found.items():
        source, copy = python.parents[1], folder / minor
        shutil.copytree(source, copy, symlinks=True, ignore=ignored, copy_function=os.link)
    return str(folder)


def normal(pins: list[str]) -> set[str]:
    """Pins with names as an index has them."""
    parts = (pin.partition("==") for pin in pins)
    return {f"{re.sub('[-_.]+', '-', name).lower()}=={version}" for name, _, version in parts}


def build_env(source: str, alias: str, logs: Path, pythons: str | None) -> str:
    options = ["--pythons", pythons] if pythons else []
    command(
        *CLI,
        "images",
        source,
        "--only",
        alias,
        "--logs",
        str(logs),
        "--keep-free-gb",
        "3",
        *options,
    )
    return plan(source, (alias,))[0].tags[0]


@pytest.mark.parametrize(("source", "alias"), ENVS)
def test_an_environment(source: str, alias: str, logs: Path, pythons: str | None) -> None:
    image = build_env(source, alias, logs, pythons)
    check("env", image)
    assert inside(image, "python --version").startswith(f"Python {ENVS[source, alias]}.")
    target = plan(source, (alias,))[0]
    assert normal([*target.pins]) <= normal(inside(image, "pip freeze --all").split())
    assert inside(image, "cat /opt/nanoswe/skipped.txt").split() == [*target.skipped]
    wheels = inside(image, "ls /opt/wheels").split()
    assert len(wheels) == len(target.build)
    # every name is there, also where one alone was lost
    command("docker", "image", "rm", target.tags[-1])
    build_env(source, alias, logs, pythons)
    command("docker", "image", "inspect", "--format={{.Id}}", *target.tags)


def test_an_environment_that_fails_says_why_and_stops_no_other(
    logs: Path, pythons: str | None
) -> None:
    options = ("--only", "django__django-1.11", "--only", "psf__requests-2.26", "--logs", str(logs))
    argv = (*CLI, "images", "verified", *options, "--keep-free-gb", "3")
    given = ("--pythons", pythons) if pythons else ()
    done = subprocess.run((*argv, *given), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search("(?s)failed .*env-django__django-1_11.*no CPython 3.5", done.stdout)
    assert re.search("(built|there) .*env-psf__requests-2_26", done.stdout)


@pytest.fixture(scope="session")
def wheels() -> Iterator[None]:
    """dist/ with the wheels of this checkout."""
    for package in ("harbor", "proxy", "evalkit"):
        argv = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist")
        command(*argv, f"packages/{package}")
    yield


def task_image(task: Path, mirror: Path) -> str:
    """The image that tools/task-image makes, checked."""
    argv = ("tools/task-image", str(task), str(mirror))
    image = command(*argv, env={"PYTHON": sys.executable}).strip()
    check("task", image)
    base = load_task(task).base_commit
    assert inside(image, "git rev-parse HEAD") == base
    return image


def test_the_image_of_a_generated_task(logs: Path, pythons: str | None, nano: Path) -> None:
    build_env("nano", "nano__all-1", logs, pythons)
    task = load_tasks(nano / "train")[0]
    image = task_image(task.path, nano / "mirror")
    try:
        assert inside(image, "python -m unittest 2>&1").endswith("OK")
    finally:
        command("docker", "image", "rm", image)


def test_the_image_of_a_package_from_its_source_distribution(
    logs: Path, pythons: str | None, tmp_path: Path
) -> None:
    build_env("verified", "psf__requests-2.26", logs, pythons)
    argv = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:")
    command(*argv, f"--dest={tmp_path}", "requests==2.26.0")
    (packed,) = tmp_path.glob("requests-*.tar.gz")
    command("tar", "-xf", str(packed), "--no-same-owner", "-C", str(tmp_path))
    tree, bare = tmp_path / "requests-2.26.0", tmp_path / "mirrors/psf/requests.git"
    # what its repository has and its source distribution has not, and the other way round
    (tree / ".gitignore").write_text("build/\n*.egg-info/\n")
    shutil.rmtree(tree / "requests.egg-info")
    git = ("git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.com")
    for step in ("init -q -b main", "add -A", "commit -q -m base", "tag later"):
        command(*git, *step.split())
    base = command(*git, "rev-parse", "HEAD").strip()
    command(*git, "commit", "-q", "--allow-empty", "-m", "the future")
    command("git", "clone", "-q", "--bare", str(tree), str(bare))
    row = json.loads(EXCERPT.read_text().splitlines()[0])
    row |= {"repo": "psf/requests", "version": "2.26", "base_commit": base}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "instance_id": "psf__requests-0"}))
    convert(read_rows(str(tmp_path / "rows.jsonl")), tmp_path / "tasks", "rows", images="built")
    image = task_image(tmp_path / "tasks/psf__requests-0", tmp_path / "mirrors")
    try:
        assert inside(image, "cd /; python -c 'import requests; print(requests.__version__, "
                      "requests.__file__)'").startswith("2.26.0 /")  # fmt: skip
        assert inside(image, "git log --format=%s --all") == "base"
    finally:
        command("docker", "image", "rm", image)


SETUP = "from setuptools import setup\n\nsetup(name='tiny', version='1', py_modules=['tiny'])\n"
TINY = {"tiny.py": "X = 1\n", "setup.py": SETUP, "pyproject.toml": "", "test_tiny.py": ""}
GOOD, BREAKS = {"tiny.py": "X = 42\n"}, {"setup.py": "raise SystemExit('gone')\n"}
JUDGED = {  # how → (changed, what the image has lost, reward)
    "resolved": (GOOD, "", "1"),
    "the patch breaks setup.py": (GOOD | BREAKS, "", "0"),
    "the patch breaks pyproject.toml": (GOOD | {"pyproject.toml": "["}, "", "0"),
    "the image cannot build it": (GOOD, "/opt/wheels/*", None),
    "neither can": (GOOD | BREAKS, "/opt/wheels/*", None),
}


def test_whose_fault_a_failed_reinstall_is(logs: Path, pythons: str | None, tmp_path: Path) -> None:
    """A task's own test.sh: a patch that breaks it scores 0; an image that does scores nothing."""
    image = build_env("verified", "psf__requests-2.26", logs, pythons)
    git = ("git", "-C", str(tree := tmp_path / "tree"), "-c", "user.name=a", "-c", "user.email=a@b")
    tree.mkdir()

    def write(files: dict[str, str]) -> str:
        for name, text in files.items():
            (tree / name).write_text(text)
        return command(*git, "diff")

    command(*git, "init", "-q", "-b", "main")
    write(TINY)
    command(*git, "add", "-A")
    command(*git, "commit", "-q", "-m", "base")
    tests = write({"test_tiny.py": "import tiny\n\n\ndef test_x():\n    assert tiny.X == 42\n"})
    command(*git, "checkout", "-q", ".")
    row = json.loads(EXCERPT.read_text().splitlines()[0])
    row |= {"instance_id": "psf__requests-0", "repo": "psf/requests", "version": "2.26"}
    row |= {"base_commit": command(*git, "rev-parse", "HEAD").strip(), "test_patch": tests}
    row |= {"FAIL_TO_PASS": ["test_tiny.py::test_x"], "PASS_TO_PASS": []}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    convert(read_rows(str(tmp_path / "rows.jsonl")), tmp_path / "tasks", "rows", images="built")
    mounts = (f"-v{tree}:/from:ro", f"-v{tmp_path}/tasks/psf__requests-0/tests:/given:ro")
    for how, (changed, lost, reward) in JUDGED.items():
        patch = write(changed)
        command(*git, "checkout", "-q", ".")
        script = f"cp -r /from/. /testbed; cp -r /given /tests; rm -f {lost}; mkdir -p "
        script += f"/logs/artifacts; printf %s {shlex.quote(patch)} > /logs/artifacts/model.patch; "
        script += "bash /tests/test.sh >&2; cat /logs/verifier/*.log >&2; "
        script += "cat /logs/verifier/reward.txt || echo None; cat /logs/verifier/report.json"
        argv = ("docker", "run", "--rm", "--network=none", *mounts, image, "bash", "-c", script)
        found, report = command(*argv).split("\n", 1)
        assert found == str(reward), f"{how}: {report}"
        assert json.loads(report)["tamper"] is False


@pytest.mark.parametrize("kind", ["base", "proxy", "evalkit", "agent"])
def test_a_static_image(kind: str, wheels: None, pythons: str | None) -> None:
    command("docker", "buildx", "bake", kind, env={"PYTHONS": pythons} if pythons else {})
    check(kind, f"nanoswe/{kind}:dev")


def test_the_linters_find_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint
    assert (
        command(hadolint, "--no-color", *map(str, sorted(ROOT.glob("docker/*/Dockerfile")))) == ""
    )


def test_every_target_has_a_dockerfile_and_names_that_bake_takes() -> None:
    for source in ("verified", "swegym"):
        text = command(*CLI, "images", source, "--print", env={"DOCKER_HOST": "unix:///none"})
        targets = json.loads(text)["target"]
        assert sum(name.startswith("env-") for name in targets) == len(plan(source))
        assert all(re.fullmatch("[a-zA-Z0-9_-]+", name) for name in targets)
        assert all(
            (ROOT / target["context"] / "Dockerfile").is_file() for target in targets.values()
        )
