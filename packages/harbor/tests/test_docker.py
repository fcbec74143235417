"""docker/: each image keeps what it promises, and what the images below it promise; no network."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanoswe_harbor.images import plan

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[3]
BESIDE = Path(sys.base_prefix).parent  # where pyenv has other versions; elsewhere they are fetched
MINORS = ("3.9", "3.11")
CLI = [sys.executable, "-m", "nanoswe_harbor"]
PARENTS = {"base": None, "env": "base", "proxy": "base", "evalkit": "base"}
CEILING_MIB = {"base": 350, "env": 700, "proxy": 600, "evalkit": 600}
ENVS = {  # (source, alias) → Python
    ("verified", "psf__requests-2.26"): "3.9",
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
    # a package's own build, as an official evaluation script asks for it, as any user
    made = 'mkdir /tmp/p; cd /tmp/p; echo \'from setuptools import setup; setup(name="zzz", '
    made += 'version="1", py_modules=["zzz"])\' > setup.py; echo \'x = 7\' > zzz.py; '
    installed = inside(image, made + "python -m pip install -q . >&2; cd /; python -c "
                       "'import zzz; print(zzz.x)'")  # fmt: skip
    assert installed == "7"
    # a reinstall that cannot work says so
    failed = inside(image, "python -m pip install -q no-such-thing-as-this || echo failed")
    assert failed.endswith("failed")


def check_proxy(image: str) -> None:
    assert "serve" in inside(image, "nanoswe-proxy --help")


def check_evalkit(image: str) -> None:
    assert "verify" in inside(image, "nanoswe-evalkit --help")


CHECKS: dict[str, Callable[[str], None]] = {
    "base": check_base, "env": check_env, "proxy": check_proxy, "evalkit": check_evalkit
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
    found = {*inside(image, "pip freeze --all").lower().replace("_", "-").split()}
    assert {pin.lower().replace("_", "-") for pin in target.pins} <= found
    assert inside(image, "cat /opt/nanoswe/skipped.txt").split() == [*target.skipped]
    wheels = inside(image, "ls /opt/wheels").split()
    assert len(wheels) == len(target.build)
    # every name is there, also where one alone was lost
    command("docker", "image", "rm", target.tags[-1])
    build_env(source, alias, logs, pythons)
    command("docker", "image", "inspect", "--format={{.Id}}", *target.tags)


@pytest.fixture(scope="session")
def wheels() -> Iterator[None]:
    """dist/ with the wheels of this checkout."""
    for package in ("harbor", "proxy", "evalkit"):
        argv = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist")
        command(*argv, f"packages/{package}")
    yield


@pytest.mark.parametrize("kind", ["base", "proxy", "evalkit"])
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
