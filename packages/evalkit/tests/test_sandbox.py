"""What every sandbox promises: on bwrap; on daytona, by the real client before a server of ours
that speaks its protocol; and on docker where `-m interop` is chosen.
"""

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Capture, Limits, Sandbox, SandboxError
from nanoswe_evalkit.sandboxes.bwrap import BwrapSandbox
from nanoswe_evalkit.sandboxes.docker import DockerSandbox
from nanoswe_harbor.task import Task

Body = Callable[[Sandbox], Awaitable[None]]
In = Callable[[Body], None]


@pytest.fixture(params=["bwrap", "daytona", pytest.param("docker", marks=pytest.mark.interop)])
def inside(request: pytest.FixtureRequest, nano: Path, task: Task, tmp_path: Path) -> In:
    """Runs a test's body in a started sandbox."""
    if request.param == "daytona":
        request.getfixturevalue("daytona")
    limits = Limits(timeout_sec=20, memory_mb=512, processes=24, output_bytes=4096, file_mb=8)
    factory = SandboxFactory(request.param, tmp_path / "work", nano / "mirror", limits)
    image_task = replace(task, docker_image="debian:bookworm-slim")

    def run(body: Body) -> None:
        async def main() -> None:
            async with factory.open(image_task) as sandbox:
                await body(sandbox)

        asyncio.run(main())

    return run


def _bash(script: str) -> list[str]:
    return ["bash", "-c", script]


def _running(marker: str) -> list[str]:
    """Command lines on this machine that contain the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in text:
            found.append(text)
    return found


def _wait_gone(marker: str) -> None:
    deadline = time.monotonic() + 5
    while _running(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _running(marker) == []


def test_exact_bytes_and_exit_codes(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(_bash(r"printf 'a\0\xff\r\n'; printf 'e' >&2; printf 'b'; exit 7"))
        assert (done.stdout, done.exit_code) == (b"a\0\xff\r\neb", 7)
        assert (await sandbox.run(_bash("kill -9 $$"))).exit_code == 137
        assert (await sandbox.run(["no-such-program"])).exit_code == 127
        assert (await sandbox.run(["true"])).stdout == b""

    inside(body)


def test_arguments_environment_and_folder(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(["printf", "%s|", "ä b", "$HOME", "*", "'", "漢"])
        assert done.stdout.decode() == "ä b|$HOME|*|'|漢|"
        done = await sandbox.run(_bash('echo "$A"; pwd'), env={"A": "x\ny"}, cwd="/usr")
        assert done.stdout == b"x\ny\n/usr\n"
        assert (await sandbox.run(["pwd"])).stdout == b"/testbed\n"

    inside(body)


def test_what_no_kernel_starts_is_a_result(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        half, long = "\ud800", "x" * (128 * 1024)
        for argv in (_bash("echo a\0b"), _bash(f"echo {half}"), ["echo", "\udc80"], ["echo", long],
                     ["true", *["y" * 100_000] * 30], [long], ["\0"]):  # fmt: skip
            done = await sandbox.run(argv)
            assert done.exit_code == 126 and done.stdout.startswith(b"cannot be run: "), done
        assert (await sandbox.run(["true"], env={"A": "\0"})).exit_code == 126
        assert (await sandbox.run(["true"], env={"A": long})).exit_code == 126
        assert len((await sandbox.run(["echo", long[:-1]], output_bytes=1 << 20)).stdout) == 1 << 17
        with pytest.raises(SandboxError, match="longer than"):
            async with sandbox.shell({"INSTRUCTION": long}):
                raise AssertionError

    inside(body)


def test_stdin(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        data = os.urandom(300_000)
        done = await sandbox.run(["sha256sum"], stdin=data)
        assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
        assert (await sandbox.run(["cat"])).stdout == b""
        assert (await sandbox.run(["true"], stdin=data)).exit_code == 0

    inside(body)


def test_big_output_is_cut_in_the_middle(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(_bash("echo first; head -c 3000000 /dev/zero; echo last"))
        assert done.truncated and done.exit_code == 0 and len(done.stdout) < 4200
        assert done.stdout.startswith(b"first\n") and done.stdout.endswith(b"last\n")

    inside(body)


def test_files_persist_in_the_work_directory(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run(
            _bash("echo one > kept; rm README.md; mkdir -p a/b; echo x >> tests/__init__.py")
        )
        done = await sandbox.run(_bash("cat kept; ls README.md; ls -d a/b; cat tests/__init__.py"))
        assert done.stdout.decode().splitlines()[0] == "one" and b"a/b" in done.stdout
        assert b"No such file" in done.stdout and done.stdout.endswith(b"x\n")

    inside(body)


def test_timeout_kills_the_whole_tree(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        began = time.monotonic()
        script = "echo begun; setsid sleep 911.25 & (trap '' TERM; sleep 911.25); wait"
        done = await sandbox.run(_bash(script), timeout_sec=0.7)
        assert done.timed_out and done.exit_code == 124 and b"begun" in done.stdout
        assert time.monotonic() - began < 5
        _wait_gone("sleep 911.25")
        assert (await sandbox.run(["echo", "alive"])).stdout == b"alive\n"

    inside(body)


def test_background_processes_end_with_their_command(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(_bash("setsid sleep 912.25 >/dev/null 2>&1 & echo ok"))
        assert done.stdout == b"ok\n"
        _wait_gone("sleep 912.25")

    inside(body)


def test_cancel_leaves_nothing(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.run(["sleep", "913.25"]))
        await asyncio.sleep(0.6)
        assert _running("sleep 913.25")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        _wait_gone("sleep 913.25")

    inside(body)


def test_cancel_while_starting_leaves_nothing(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        for delay_ms in range(0, 24, 2):
            running = asyncio.create_task(sandbox.run(["sleep", "915.25"]))
            await asyncio.sleep(delay_ms / 1000)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        _wait_gone("sleep 915.25")

    inside(body)


def test_no_network(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(["cat", "/proc/net/dev"])
        names = [line.split(":")[0].strip() for line in done.stdout.decode().splitlines()[2:]]
        assert names == ["lo"]
        done = await sandbox.run(_bash("echo > /dev/tcp/192.0.2.1/80"))
        assert done.exit_code and b"unreachable" in done.stdout

    inside(body)


def test_processes_are_bounded(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        bomb = await sandbox.run(_bash(":(){ :|:& };:; sleep 914.25"), timeout_sec=1.5)
        assert bomb.timed_out or bomb.exit_code
        _wait_gone("sleep 914.25")
        done = await sandbox.run(
            _bash("for i in {1..60}; do sleep 5 & done; jobs -p | wc -l"), timeout_sec=3
        )
        assert done.timed_out or done.exit_code or int(done.stdout.split()[-1]) < 24
        assert (await sandbox.run(["echo", "alive"])).stdout == b"alive\n"

    inside(body)


def test_file_size_is_bounded(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(_bash("head -c 20000000 /dev/zero > big; stat -c %s big"))
        assert int(done.stdout.split()[-1]) <= 8 * 1024 * 1024

    inside(body)


async def _say(terminal: int, text: str, wanted: str) -> str:
    """Type into a terminal; what it shows until `wanted` is there."""
    os.set_blocking(terminal, False)
    for start in range(0, len(text), 512):  # as a person would, in pieces
        os.write(terminal, text[start : start + 512].encode())
    shown, deadline = "", time.monotonic() + 15
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        await asyncio.sleep(0.02)
        with suppress(BlockingIOError):
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def test_a_shell_keeps_its_state_and_commands_run_beside_it(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        async with sandbox.shell() as terminal:
            await _say(terminal, "cd tests; X=5; echo kept > /tmp/k; echo d''one\n", "done")
            await _say(terminal, "setsid sleep 916.25 & echo $X$PWD\n", "5/testbed/tests")
            await _say(terminal, "read -p as''k: A\n", "ask:")
            await _say(terminal, "line\n", "line")
            await _say(terminal, "sleep 919; echo $A\n", "sleep 919")
            await asyncio.sleep(0.3)
            await _say(terminal, "\x03", "^C")
            await _say(terminal, "exit\n", "exit")  # a fresh bash comes, and the rest stays
            await _say(terminal, "X=${X}6; echo f''resh$X; cat /tmp/k\n", "fresh6\r\nkept")
            done = await sandbox.run(_bash("cat /tmp/k; pwd; cat; exit 3"), stdin=b"\0in")
            assert (done.stdout, done.exit_code) == (b"kept\n/testbed\n\0in", 3)
            began = time.monotonic()
            done = await sandbox.run(_bash("echo 1; sleep 917.25"), timeout_sec=1)
            assert done.timed_out and done.stdout == b"1\n" and time.monotonic() - began < 8
            await sandbox.run(_bash("sleep 918.25 >/dev/null 2>&1 & echo 2"))
            assert _running("sleep 916.25")  # nothing is killed while the shell is open
        _wait_gone("sleep 916.25")
        _wait_gone("sleep 918.25")
        assert (await sandbox.run(["echo", "alive"])).stdout == b"alive\n"

    inside(body)


def test_many_at_once(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        async with sandbox.shell():  # while it is open, commands leave each other alone
            runs = [
                sandbox.run(_bash(f"sleep 0.2; cat; exit {n}"), stdin=b"%d" % n) for n in range(2)
            ]
            done = await asyncio.gather(*runs)
        assert [(d.exit_code, d.stdout) for d in done] == [(n, b"%d" % n) for n in range(2)]

    inside(body)


def test_binary_files_and_names(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        data, name = os.urandom(200_000), "ä 'b\" \n漢"
        await sandbox.run(["sh", "-c", 'cat > "$0"', name], stdin=data)
        done = await sandbox.run(["cat", name], output_bytes=1 << 20)
        assert done.stdout == data and not done.truncated

    inside(body)


def test_the_sandbox_dies_under_a_command(inside: In) -> None:
    async def body(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.run(["sleep", "920"]))
        await asyncio.sleep(0.7)
        match sandbox:
            case BwrapSandbox():
                os.kill(sandbox._init, signal.SIGKILL)
            case DockerSandbox():
                sandbox._container.kill()
            case _:
                await sandbox._box.delete()  # type: ignore[attr-defined]
        began = time.monotonic()
        with pytest.raises(SandboxError):
            await running
        with pytest.raises(SandboxError):
            await sandbox.run(["true"])
        assert time.monotonic() - began < 10

    inside(body)


def test_capture_keeps_both_ends() -> None:
    capture = Capture(8)
    for piece in (b"ab", b"cdef", b"ghijkl", b"mn"):
        capture.feed(piece)
    assert capture.value() == b"abcd\n[6 bytes dropped]\nklmn"
