"""layers: an image's layers, applied to a folder one after the other.

In: files of layers (tar, perhaps gzip), the digests of what is in them. Out: the tree, whiteouts
done; owners and set-id bits are left out, and so is dev/, which a sandbox brings. Refuses
(UnpackError) a wrong digest and what no honest layer has: absolute paths, `..`, a way through a
link, links that lead out, devices, pipes, sparse files, more than the budget.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nanoswe_harbor.instance import HarborError

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
SLACK = 16 * 2**20  # bytes of headers before a member


class UnpackError(HarborError):
    """An image is not what it should be, or is hostile."""


@dataclass
class Budget:
    """What all layers of an image may still bring."""

    size: float
    files: int = 2_000_000

    def take(self, size: int) -> None:
        self.size, self.files = self.size - size, self.files - 1
        if size < 0 or self.size < 0 or self.files < 0:
            raise UnpackError("more bytes or files than --max-gb or the disk allow")


class _Stream:
    """Hashes what is read of a file, and lets no header be read without an end."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self.file, self.sha, self.allowed = file, hashlib.sha256(), SLACK

    def read(self, size: int) -> bytes:
        content = self.file.read(size)
        self.sha.update(content)
        self.allowed -= len(content)
        if self.allowed < 0:
            raise UnpackError(f"more than {SLACK} bytes between two files")
        return content


def apply(layer: Path, diff_id: str, root: Path, budget: Budget) -> None:
    """Put one layer onto the tree in `root`, a path without links."""
    with layer.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: Any = _Stream(gzip.GzipFile(fileobj=raw) if packed else raw)
        made: set[Path] = set()
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                budget.take(member.size)
                stream.allowed = member.size + SLACK
                target = _inside(root, member.name)
                if target == root or target.relative_to(root).parts[0] == "dev":
                    continue
                if target.name.startswith(WHITEOUT):
                    _whiteout(target, made)
                else:
                    checked = _checked(member, root, target)
                    if not (member.isdir() and target.is_dir() and not target.is_symlink()):
                        _remove(target)
                    if member.islnk():  # perhaps to a link, which is not followed
                        target.parent.mkdir(parents=True, exist_ok=True)
                        source = _inside(root, member.linkname)
                        os.link(source, target, follow_symlinks=False)
                    else:
                        extract(tar, checked, root)
                    made.update((target, *target.parents))
        while stream.read(2**20):  # what follows the last member counts for the digest
            stream.allowed = SLACK
    if f"sha256:{stream.sha.hexdigest()}" != diff_id:
        raise UnpackError(f"a layer is not {diff_id}; fetch the image again")


def extract(tar: tarfile.TarFile, checked: tarfile.TarInfo, root: Path) -> None:
    """As it is: tarfile's own filters are younger than some Python 3.11."""
    tar.extraction_filter = lambda member, _: member
    tar.extract(checked, root)


def extract_plain(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    """A file of an archive of layers, whose links lead to others of it."""
    if member.issym() and member.linkname.startswith("/"):
        raise UnpackError(f"{member.name}: a link that leads out, to {member.linkname}")
    if (target := _inside(root, member.name)) != root:
        extract(tar, _checked(member, root, target), root)


def _inside(root: Path, name: str) -> Path:
    """Where a member goes. Refuses a name that leads out, and a way through a link."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    target = root.joinpath(*parts)
    if (
        name.startswith("/")
        or ".." in parts
        or os.path.realpath(target.parent) != str(target.parent)
    ):
        raise UnpackError(f"{name}: a path that leads out, or through a link")
    return target


def _whiteout(mark: Path, made: set[Path]) -> None:
    """Remove what a mark hides of lower layers, and nothing that this one brought."""
    if mark.name == OPAQUE:
        for path in [path for path in mark.parent.rglob("*") if path not in made]:
            _remove(path)
    elif name := mark.name.removeprefix(WHITEOUT):
        _remove(_inside(mark.parent, name))


def _checked(member: tarfile.TarInfo, root: Path, target: Path) -> tarfile.TarInfo:
    """A member without owner and set-id bits. Refuses links that lead out, and special files."""
    leads = member.linkname if member.issym() else ""
    if member.islnk():
        source = _inside(root, member.linkname)
        leads = str(source.readlink()) if source.is_symlink() else ""
        if not leads and not source.is_file():
            raise UnpackError(f"{member.name}: a hard link to {member.linkname}, not a file here")
    elif not (member.isdir() or leads or (member.isreg() and not member.issparse())):
        raise UnpackError(f"{member.name}: a device, a pipe or a sparse file")
    way = os.path.normpath(target.parent.relative_to(root) / leads)
    if leads and way.startswith("..") and not leads.startswith("/"):
        raise UnpackError(f"{member.name}: a link that leads out, to {leads}")
    mode = member.mode & 0o1777 | (0o700 if member.isdir() else 0o600)
    checked = copy(member)
    checked.mode, checked.uid, checked.gid = mode, os.geteuid(), os.getegid()
    checked.uname = checked.gname = ""
    return checked


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
