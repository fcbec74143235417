"""unpack: layers to a tree as Docker has it; hostile archives are refused and leave nothing."""

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoswe_harbor.instance import HarborError
from nanoswe_harbor.unpack import UnpackError, name_path, unpack

Member = tuple[str, Any]  # a name, and content (bytes) or a type of tarfile's with a link
DIR, LINK, HARD = (tarfile.DIRTYPE, ""), tarfile.SYMTYPE, tarfile.LNKTYPE


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def layer(*members: Member, mode: int = 0o644) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, what in members:
            info = tarfile.TarInfo(name)
            info.mode, info.mtime, info.uid = mode, 1_700_000_000, 12345
            if isinstance(what, bytes):
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
                continue
            info.type, info.linkname = what
            info.mode = 0o755 if what == DIR else mode
            tar.addfile(info)
    return file.getvalue()


def archive(
    path: Path, layers: list[bytes], oci: bool = False, diff_ids: list[str] | None = None
) -> Path:
    """What `docker save` writes, or an OCI layout with packed layers."""
    diffs = diff_ids or [f"sha256:{sha(content)}" for content in layers]
    config = json.dumps({"config": {"Env": ["A=b"]}, "rootfs": {"diff_ids": diffs}}).encode()
    packed = [gzip.compress(content) if oci else content for content in layers]
    files = {f"blobs/sha256/{sha(content)}": content for content in (config, *packed)}
    names = list(files)
    if oci:
        refs = [{"digest": f"sha256:{name.rpartition('/')[2]}"} for name in names]
        manifest = json.dumps({"config": refs[0], "layers": refs[1:]}).encode()
        named = {"io.containerd.image.name": "x/y:1"}
        entry = {"digest": f"sha256:{sha(manifest)}", "annotations": named}
        files |= {f"blobs/sha256/{sha(manifest)}": manifest}
        files |= {"index.json": json.dumps({"manifests": [entry]}).encode()}
    else:
        listing = [{"Config": names[0], "RepoTags": ["x/y:1"], "Layers": names[1:]}]
        files |= {"manifest.json": json.dumps(listing).encode()}
    path.write_bytes(layer(*files.items()))
    return path


def tree(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return {name: what for name, what in found.items() if name not in ("dev", "proc", "sys", "tmp")}


FIRST = layer(
    ("a", DIR), ("a/one", b"1"), ("a/two", b"2"), ("a/sub", DIR), ("a/sub/low", b"l"),
    ("a/gone", DIR), ("a/gone/x", b"x"), ("b", DIR), ("b/link", (LINK, "../a/one")),
    ("etc", (LINK, "/a")), ("b/hard", (HARD, "a/two")), ("run", b"#!"),
    ("dev/null", (tarfile.CHRTYPE, "")),
)  # fmt: skip
SECOND = layer(
    ("a/.wh.gone", b""), ("b", DIR), ("b/hard", b"mine"), ("a/sub", DIR), ("a/sub/new", b"n"),
    ("a/sub/.wh..wh..opq", b""), ("etc", DIR), ("etc/passwd", b"p"),
)  # fmt: skip
MERGED = {
    "a": None, "a/one": b"1", "a/two": b"2", "a/sub": None, "a/sub/new": b"n", "b": None,
    "b/link": "-> ../a/one", "b/hard": b"mine", "etc": None, "etc/passwd": b"p", "run": b"#!",
}  # fmt: skip


@pytest.mark.parametrize("oci", [False, True])
def test_layers_become_a_tree(tmp_path: Path, oci: bool) -> None:
    source = archive(tmp_path / "image.tar", [FIRST, SECOND], oci)
    folder = unpack(str(source), tmp_path / "store")
    assert tree(folder / "root") == MERGED
    config = (folder / "config.json").read_bytes()
    assert folder.name == sha(config) and json.loads(config)["config"]["Env"] == ["A=b"]
    assert name_path(tmp_path / "store", "x/y:1").resolve() == folder
    assert (folder / "root/a/two").stat().st_mtime == 1_700_000_000
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        folder.name,
        "files",
        "names",
    ]


def test_a_hard_link_to_a_link_is_the_link(tmp_path: Path) -> None:
    links = [("lib", (LINK, "a")), ("lib64", (HARD, "lib")), ("p", (LINK, "/etc/passwd"))]
    content = layer(("a", DIR), *links, ("new/q", (HARD, "p")))
    folder = unpack(str(archive(tmp_path / "image.tar", [content])), tmp_path / "store")
    assert tree(folder / "root") == {
        "a": None, "lib": "-> a", "lib64": "-> a", "new": None, "new/q": "-> /etc/passwd",
        "p": "-> /etc/passwd",
    }  # fmt: skip


def test_the_same_image_is_unpacked_once_and_set_id_bits_are_lost(tmp_path: Path) -> None:
    content = layer(("su", b"x"), mode=0o6755)
    source = archive(tmp_path / "image.tar", [content])
    folder = unpack(str(source), tmp_path / "store")
    file = folder / "root/su"
    assert stat.S_IMODE(file.stat().st_mode) == 0o755 and file.stat().st_uid == os.getuid()
    file.write_bytes(b"touched")
    assert unpack(str(archive(tmp_path / "oci.tar", [content], True)), tmp_path / "store") == folder
    assert file.read_bytes() == b"touched"


def test_equal_files_of_images_are_on_disk_once(tmp_path: Path) -> None:
    """Those of the same content, mode and time; an image of its own keeps what it had."""
    low, empty = layer(("a", b"same"), ("b", (HARD, "a")), ("e", b"")), layer(("e", b""))
    images = [[low, layer(("c", b"mine"))], [low, layer(("c", b"yours"))]]
    images += [[layer(("a", b"same"), mode=0o755)], [empty]]
    store, roots = tmp_path / "store", []
    for number, layers in enumerate(images):
        source = archive(tmp_path / f"{number}.tar", layers)
        roots.append(unpack(str(source), store) / "root")
    first, second, third, _ = roots
    assert (first / "a").samefile(second / "b") and (first / "a").stat().st_nlink == 5
    assert not (first / "a").samefile(third / "a")
    assert (first / "c").read_bytes() == b"mine" and (second / "c").read_bytes() == b"yours"
    assert not (first / "e").samefile(second / "e")
    kept = [path.read_bytes() for path in (store / "files").iterdir()]
    assert sorted(kept) == [b"mine", b"same", b"same", b"yours"]
    assert not list(store.rglob("link"))


HOSTILE = {
    "an absolute path": [("/etc/passwd", b"x")],
    "a path that leads out": [("a/../../x", b"x")],
    "through a link": [("a", (LINK, "/")), ("a/x", b"x")],
    "through a link of a folder of ours": [("b", DIR), ("a", (LINK, "b")), ("a/x", b"x")],
    "a link that leads out": [("a", DIR), ("a/b", (LINK, "../../x"))],
    "a hard link out": [("a", (HARD, "../secret"))],
    "an absolute hard link": [("a", (HARD, "/etc/passwd"))],
    "a hard link to nothing": [("a", (HARD, "b"))],
    "a hard link through a link": [("l", (LINK, "/etc")), ("a", (HARD, "l/passwd"))],
    "a hard link to a link, from where it leads out": [
        ("d", DIR),
        ("d/e", DIR),
        ("d/e/l", (LINK, "../../x")),
        ("l", (HARD, "d/e/l")),
    ],
    "a device": [("sda", (tarfile.BLKTYPE, ""))],
    "a pipe": [("p", (tarfile.FIFOTYPE, ""))],
    "a whiteout that leads out": [("a", DIR), ("a/.wh...", b"")],
    "a whiteout through a link": [("a", (LINK, "/")), ("a/.wh.etc", b"")],
    "a name that is too long": [("x" * 300, b"")],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_layers_are_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "secret").write_text("s")
    source = archive(tmp_path / "image.tar", [layer(("ok", b"")), layer(*HOSTILE[what])])
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises((HarborError, OSError)):
        unpack(str(source), tmp_path / "store")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["names"]
    assert not any((tmp_path / "store/names").iterdir())
    assert before == {p: p.lstat().st_mtime_ns for p in tmp_path.iterdir() if p.name != "store"}


def sparse(name: str, size: int) -> bytes:
    """A GNU sparse header: a file of `size` bytes that has none."""
    info = tarfile.TarInfo(name)
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 0
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header[:512])


BOMBS: dict[str, Callable[[], bytes]] = {
    "bytes": lambda: layer(("zero", bytes(3 * 2**20))),
    "a sparse file": lambda: sparse("big", 2**40) + bytes(1024),
    "a header without an end": lambda: layer(("x", b""))[:0] + _long_header(64 * 2**20),
}


def _long_header(size: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, size
    return info.tobuf(tarfile.GNU_FORMAT) + b"a" * size


@pytest.mark.parametrize("what", BOMBS)
def test_bombs_are_refused(tmp_path: Path, what: str) -> None:
    source = archive(tmp_path / "image.tar", [BOMBS[what]()], oci=True)
    with pytest.raises(UnpackError, match=r"more (than|bytes)|sparse"):
        unpack(str(source), tmp_path / "store", max_gb=2 / 1024)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["names"]


def test_a_packed_archive_larger_than_it_looks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(gzip.compress(layer(("zero", bytes(3 * 2**20)))))
    with pytest.raises(UnpackError, match="more bytes"):
        unpack(str(tmp_path / "image.tar"), tmp_path / "store", max_gb=2 / 1024)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["names"]


def test_an_opaque_mark_spares_what_came_with_it(tmp_path: Path) -> None:
    low = layer(("d", DIR), ("d/e", DIR), ("d/e/low", b""), ("d/low", b""))
    high = layer(("d/e/high", b""), ("d/.wh..wh..opq", b""), ("d/last", b""))
    folder = unpack(str(archive(tmp_path / "image.tar", [low, high])), tmp_path / "store")
    assert set(tree(folder / "root")) == {"d", "d/e", "d/e/high", "d/last"}


def _no_time() -> bytes:
    """A layer with a file of an endless time."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("x")
        info.pax_headers = {"mtime": "inf"}
        tar.addfile(info)
    return file.getvalue()


def listing(config: str, *layers: str) -> bytes:
    described = [{"Config": config, "RepoTags": [], "Layers": layers}]
    return layer(("manifest.json", json.dumps(described).encode()))


def test_what_is_no_image(tmp_path: Path) -> None:
    whole = archive(tmp_path / "image.tar", [FIRST]).read_bytes()
    tagged = archive(tmp_path / "tagged.tar", [FIRST]).read_bytes()
    broken = {
        "empty": b"",
        "text": b"no archive\n" * 100,
        "cut": whole[: len(whole) // 2],
        "another": layer(("a", b"b")),
        "no list": layer(("manifest.json", b"{}")),
        "no layer": listing("c", "l"),
        "outside": listing("/etc/passwd"),
        "no name": tagged.replace(b'["x/y:1"]', b"[1234567]"),
        "a name that leads out": tagged.replace(b'"x/y:1"', b'"../../"'),
        "no time": archive(tmp_path / "time.tar", [_no_time()]).read_bytes(),
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        command = [sys.executable, "-m", "nanoswe_harbor", "image", "unpack", str(tmp_path / name)]
        command += ["--store", str(tmp_path / "store")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (name, done)
        assert name in done.stderr and done.stderr.startswith("error: "), name
    wrong = archive(tmp_path / "image.tar", [FIRST], diff_ids=[f"sha256:{'0' * 64}"])
    with pytest.raises(UnpackError, match="fetch the image again"):
        unpack(str(wrong), tmp_path / "store")
