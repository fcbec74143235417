"""unpack: an image as a folder, without Docker and without root.

In: the name of an image in a registry, or an archive (`docker save`, OCI). Out: STORE/<image id>/
{root, config.json}, found by STORE/names/<name>; equal files are one, in STORE/files. Each layer is
checked against its digest (layers.py). Refuses (UnpackError) what is cut off, or no image.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from nanoswe_harbor.families import BAD_ROW
from nanoswe_harbor.layers import Budget, UnpackError, apply, extract_plain
from nanoswe_harbor.registry import Registry, parse

GIB, MOST_JSON = 2**30, 8 * 2**20
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
BROKEN = (tarfile.TarError, zlib.error, EOFError, OSError, AttributeError, OverflowError, *BAD_ROW)


def name_path(store: Path, image: str) -> Path:
    """What stands for the name of an image in a store: a link to its folder."""
    return store / "names" / quote(image, safe="")


def unpack(source: str, store: Path, registry: str = "", max_gb: float = 40) -> Path:
    """Unpack an archive, or an image by name. The folder that holds `root` and `config.json`."""
    store = store.resolve()
    (store / "names").mkdir(parents=True, exist_ok=True)
    pulled = store / ".pulled"  # what an interrupted pull got is kept
    with tempfile.TemporaryDirectory(dir=store, prefix=".part-") as scratch:
        try:
            if Path(source).is_file():
                outer = Budget(max_gb * GIB)  # it may be compressed, and larger than it looks
                with tarfile.open(source) as archive:
                    for member in archive:
                        outer.take(member.size)
                        extract_plain(archive, member, Path(scratch).resolve())
                names, config, layers = _read(Path(scratch))
            else:
                asyncio.run(_pull(source, registry, pulled))
                names, config, layers = [source], *_read(pulled)[1:]
            links = [name_path(store, name) for name in names if parse(name)]
            final = store / hashlib.sha256(config).hexdigest()
            if not final.exists():
                _build(config, layers, Path(scratch, "new"), max_gb)
                _share(Path(scratch, "new"), store / "files")
                Path(scratch, "new").rename(final)
        except BROKEN as error:
            text = f"{source}: not a whole image ({error or type(error).__name__})"
            raise UnpackError(text) from error
        shutil.rmtree(pulled, ignore_errors=True)
    for link in links:
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", final.name))
    return final


async def _pull(image: str, registry: str, folder: Path) -> None:
    """Fetch an image as an OCI layout."""
    repository, reference = parse(image, registry)
    async with Registry() as client:
        content = await client.manifest(repository, reference)
        if entries := json.loads(content).get("manifests"):
            wanted = {"os": "linux", "architecture": ARCHITECTURES.get(os.uname().machine)}
            fits = [entry for entry in entries if wanted.items() <= entry["platform"].items()]
            content = await client.manifest(repository, fits[0]["digest"])
        (folder / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        paths = {digest: folder / _path(digest) for digest in _digests(content)}
        await asyncio.gather(*(client.blob(repository, *blob) for blob in paths.items()))
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    (folder / _path(digest)).write_bytes(content)
    (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": digest}]}))


def _read(folder: Path) -> tuple[list[str], bytes, list[Path]]:
    """(names, configuration, layers) of what `docker save` wrote, or of an OCI layout."""
    if (listing := folder / "manifest.json").is_file():
        found = json.loads(_small(listing))[0]
        names, files = found["RepoTags"] or [], [found["Config"], *found["Layers"]]
    else:
        entry = json.loads(_small(folder / "index.json"))["manifests"][0]
        names = list(filter(None, [entry.get("annotations", {}).get("io.containerd.image.name")]))
        files = [_path(digest) for digest in _digests(_small(folder / _path(entry["digest"])))]
    if any(name.startswith("/") or ".." in name for name in files):
        raise ValueError("a layer outside of it")
    return names, _small(folder / files[0]), [folder / name for name in files[1:]]


def _digests(manifest: bytes) -> list[str]:
    """The digests of the configuration and of each layer."""
    found = json.loads(manifest)
    return [part["digest"] for part in (found["config"], *found["layers"])]


def _build(config: bytes, layers: list[Path], new: Path, max_gb: float) -> None:
    """Make an image's folder of its layers."""
    (new / "root").mkdir(parents=True)
    (new / "config.json").write_bytes(config)
    budget = Budget(min(max_gb * GIB, shutil.disk_usage(new).free - GIB))
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    for layer, diff_id in zip(layers, diff_ids, strict=True):
        apply(layer, diff_id, new / "root", budget)
    for name in ("dev", "proc", "sys", "tmp"):  # where a sandbox mounts
        (new / "root" / name).mkdir(exist_ok=True)


def _share(new: Path, kept: Path) -> None:
    """Make files that other images of the store have too links to those."""
    kept.mkdir(exist_ok=True)
    for path in (new / "root").rglob("*"):
        told = path.lstat()
        if stat.S_ISREG(told.st_mode) and told.st_size:
            with path.open("rb") as file:
                sha = hashlib.file_digest(file, "sha256").hexdigest()
            same = kept / f"{sha}-{told.st_mode:o}-{told.st_mtime_ns}"
            with suppress(OSError):  # it has as many links as it can: one more of its kind
                if not same.exists():
                    same.hardlink_to(path)
                elif not same.samefile(path):
                    (new / "link").hardlink_to(same)
                    (new / "link").rename(path)


def _small(path: Path) -> bytes:
    """The whole of a file that describes others."""
    if path.stat().st_size > MOST_JSON:
        raise ValueError("a description of more than 8 MiB")
    return path.read_bytes()


def _path(digest: str) -> str:
    """Where a blob lies in an OCI layout."""
    if not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is no digest")
    return f"blobs/{digest.replace(':', '/')}"
