"""bwrap alone: what is visible, how memory is bounded, many at once, what stays behind."""

import asyncio
import sys
import sysconfig
from pathlib import Path

from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_harbor.task import Task


def _run(
    sandboxes: SandboxFactory, task: Task, script: str, timeout_sec: float = 20
) -> tuple[int, str]:
    async def main() -> tuple[int, str]:
        async with sandboxes.open(task) as sandbox:
            done = await sandbox.run(["bash", "-c", script], timeout_sec=timeout_sec)
            return done.exit_code, done.stdout.decode()

    return asyncio.run(main())


def test_what_is_visible(sandboxes: SandboxFactory, task: Task, tmp_path: Path) -> None:
    _, top = _run(sandboxes, task, "ls -A /")
    assert set(top.split()) <= {
        *("bin", "dev", "etc", "home", "lib", "lib32", "lib64", "proc", "root", "sbin"),
        *("testbed", "tmp", "usr", Path(sys.base_prefix).parts[1]),
    }
    _, etc = _run(sandboxes, task, "ls -A /etc")
    assert set(etc.split()) <= {
        *("alternatives", "gitconfig", "group", "hosts", "ld.so.cache", "nsswitch.conf", "passwd"),
    }
    prefix_top = Path(sys.base_prefix).parts[2] if sys.base_prefix.startswith("/root") else ""
    assert _run(sandboxes, task, "ls -A /root; ls -A /home")[1].split() == [prefix_top] * bool(
        prefix_top
    )
    assert _run(sandboxes, task, "ls -A /tmp")[1] == "home\n"
    hidden = [task.path, tmp_path, Path(__file__), Path.cwd(), task.path.parent.parent / "mirror"]
    if sys.prefix != sys.base_prefix:
        hidden.append(Path(sys.prefix))
    assert _run(sandboxes, task, "ls -d " + " ".join(map(str, hidden)) + " 2>/dev/null")[1] == ""
    search = "find / -path /proc -prune -o \\( -name gold.patch -o -name 'nanoswe_*' \\) -print"
    search += " 2>/dev/null; true"
    assert _run(sandboxes, task, search) == (0, "")


def test_runs_as_an_ordinary_user(sandboxes: SandboxFactory, task: Task) -> None:
    script = "id -un; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status | cut -f 2; echo > /x"
    code, text = _run(sandboxes, task, script)
    user, effective, bounding, no_new_privileges, *_ = text.split()
    assert (code, user, effective, no_new_privileges) == (1, "agent", "0" * 16, "1")
    assert bounding == "0" * 16


def test_python_is_the_harness_own_without_its_packages(
    sandboxes: SandboxFactory, task: Task
) -> None:
    site = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    script = "import os, sys; print(sys.base_prefix, len(os.listdir(sys.argv[1])))"
    code, text = _run(sandboxes, task, f"python3 -c '{script}' {site}")
    prefix, packages = text.split()
    assert (code, prefix) == (0, sys.base_prefix)
    # A prefix below /usr is the machine's own, and shown as it is.
    assert packages == "0" or prefix.startswith("/usr")


def test_only_its_own_processes(sandboxes: SandboxFactory, task: Task) -> None:
    _, text = _run(sandboxes, task, "echo /proc/[0-9]*")
    assert len(text.split()) <= 3


def test_git_is_clean_and_has_no_future(sandboxes: SandboxFactory, task: Task) -> None:
    assert _run(sandboxes, task, "git status --porcelain && git rev-parse HEAD") == (
        0,
        f"{task.base_commit}\n",
    )
    assert _run(sandboxes, task, "git log --all --format=%s | grep -c Fix")[1] == "0\n"


def test_memory_of_one_process_is_bounded(sandboxes: SandboxFactory, task: Task) -> None:
    code, text = _run(sandboxes, task, "python3 -c 'bytearray(900 << 20)'")
    assert code == 1 and "MemoryError" in text


def test_memory_of_all_processes_is_bounded(sandboxes: SandboxFactory, task: Task) -> None:
    hog = "python3 -c 'import time; x = bytearray(b\"x\") * (200 << 20); time.sleep(9)'"
    code, text = _run(sandboxes, task, f"{hog} & {hog} & {hog} & {hog} & wait")
    assert code == 137 and "MiB of memory" in text


def test_tmp_is_bounded(sandboxes: SandboxFactory, task: Task) -> None:
    script = "for i in 1 2 3; do head -c 5000000 /dev/zero > /tmp/$i || exit 3; done"
    assert _run(sandboxes, task, script)[0] == 3


def test_forks_are_bounded(sandboxes: SandboxFactory, task: Task) -> None:
    script = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(5); os._exit(0)
        n += 1
except BlockingIOError:
    print(n)
"""
    code, text = _run(sandboxes, task, f"exec python3 -c '{script}'")
    assert code == 0 and 10 < int(text) <= 24


def test_many_at_once_do_not_see_each_other(sandboxes: SandboxFactory, task: Task) -> None:
    async def one(number: int) -> str:
        async with sandboxes.open(task) as sandbox:
            await sandbox.run(["bash", "-c", f"echo {number} >> shared; sleep 0.1"])
            return (await sandbox.run(["cat", "shared"])).stdout.decode()

    async def main() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(12)))

    assert asyncio.run(main()) == [f"{number}\n" for number in range(12)]


def test_nothing_stays_behind(sandboxes: SandboxFactory, task: Task) -> None:
    _run(sandboxes, task, "mkdir -p deep/er; touch deep/er/file; chmod 000 deep/er deep")
    assert not list((sandboxes.work / "checkouts").glob(".live-*"))
    checkout = sandboxes.work / "checkouts" / task.task_id
    assert not (checkout / "deep").exists()
