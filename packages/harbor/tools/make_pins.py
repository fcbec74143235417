"""Add exact pins to specs/locks.yaml and specs/images.yaml for (repo, version)s that have none.

Use: python tools/make_pins.py ROWS MIRROR [OWNER/REPO-VERSION ...]   (needs uv and a package index)

What a spec's install lines and package files name is resolved as of the newest row's base commit:
nothing that was uploaded sixty days later is looked at, so that the result stays the same.
"""

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from nanoswe_harbor.checkout import checkout
from nanoswe_harbor.envspec import EnvSpec, find_spec
from nanoswe_harbor.sources import read_rows

SPECS = Path(__file__).resolve().parent.parent / "src/nanoswe_harbor/specs"
STYLE = {"width": 118, "default_flow_style": None}


def asked_for(spec: EnvSpec, tree: Path) -> tuple[list[str], list[str], list[str]]:
    """(requirement files, requirements, extras) of pip's command lines and the spec's own lists."""
    files = [name for name in spec.package_files if (tree / name).is_file()][:1]
    extras, plain = [], [*spec.pip_packages, "pip", "setuptools", "wheel"]
    plain += [] if spec.package_files else spec.packages.split()
    for line in re.findall(r"pip install ([^;|&}]*)", "; ".join(spec.install)):
        words = shlex.split(line)
        files += [words[n + 1] for n, word in enumerate(words) if word == "-r"]
        for word in words:
            if project := re.fullmatch(r"\.(?:\[(.*)\])?", word):
                extras += ["", *filter(None, (project[1] or "").split(","))]
            elif re.match("[a-zA-Z]", word) and word not in files:
                plain.append(word)
    return [name for name in files if (tree / name).is_file()], plain, extras


def compile_pins(
    tree: Path, python: str, until: str, files: list[str], plain: list[str]
) -> list[str]:
    options = ["--python-version", python, "--exclude-newer", until, "--no-annotate", "--no-header"]
    argv = ["uv", "pip", "compile", "-q", "--no-strip-extras", *options, *files, "-"]
    text = "\n".join(plain)
    done = subprocess.run(argv, cwd=tree, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree.name}: {done.stderr}")
    lines = (line.partition(";")[0].strip() for line in done.stdout.splitlines())
    return sorted(re.sub(r"\[.*\]", "", line) for line in lines if "==" in line)


def pins_of(row, spec: EnvSpec, mirror: Path) -> tuple[list[str], list[str]]:
    """(the environment's pins, those of what the project is built with)."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, row.instance_id)
        checkout(row.repo, row.base_commit, mirror, tree)
        for line in spec.pre_install:
            if line.startswith("sed "):
                subprocess.run(["bash", "-c", line], cwd=tree, check=True)
        made = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=tree, text=True)
        day = datetime.fromtimestamp(int(made), UTC) + timedelta(
            days=60
        )  # a spec may name a fix that came later
        until = day.strftime("%Y-%m-%dT00:00:00Z")
        files, plain, extras = asked_for(spec, tree)
        if extras:
            project = "pyproject.toml" if (tree / "pyproject.toml").is_file() else "setup.py"
            files += [project, *(f"--extra={name}" for name in dict.fromkeys(filter(None, extras)))]
        pins = compile_pins(tree, spec.python, until, files, plain)
        build = tree / "pyproject.toml"
        table = tomllib.loads(build.read_text()) if build.is_file() else {}
        wants = table.get("build-system", {}).get("requires", ["setuptools", "wheel"])
        return pins, compile_pins(tree, spec.python, until, [], [*wants, "setuptools", "wheel"])


def main() -> None:
    source, mirror, *only = sys.argv[1:]
    os.environ["GIT_CEILING_DIRECTORIES"] = tempfile.gettempdir()
    newest = {}
    for row in sorted(read_rows(source), key=lambda row: row.created_at):
        newest[row.repo, row.version] = row
    locks, images = (yaml.safe_load((SPECS / n).read_text()) for n in ("locks.yaml", "images.yaml"))
    for (repo, version), row in newest.items():
        if version in locks["pairs"].get(repo, {}) or (only and f"{repo}-{version}" not in only):
            continue
        pins, build = pins_of(row, find_spec(repo, version)[1], Path(mirror))
        key = hashlib.sha256("\n".join([*pins, *build]).encode()).hexdigest()[:12]
        locks["locks"][key], images["builds"][key] = pins, build
        locks["pairs"].setdefault(repo, {})[version] = {key: [row.instance_id]}
        print(f"{repo} {version}: {len(pins)} pins, {len(build)} to build with, {key}")
    path = SPECS / "locks.yaml"
    head = "".join(re.findall(r"(?m)^#.*\n", path.read_text()))
    path.write_text(head + yaml.safe_dump(locks, sort_keys=False, **STYLE))
    path = SPECS / "images.yaml"
    builds = yaml.safe_dump({"builds": images["builds"]}, **STYLE)
    before, _, rest = path.read_text().partition("builds:")
    path.write_text(before + builds + rest[rest.index("#") :])


if __name__ == "__main__":
    main()
