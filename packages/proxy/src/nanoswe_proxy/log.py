"""The session log: an append-only file of checksummed records from which a session is rebuilt.

In: records (a JSON object and a blob of raw columns). Out: a file that survives the death of the
process at any instruction: what `append` returned from is there, a torn tail is found and cut. Each
checksum covers the one before it. Refuses (LogError) a file that is no log, and a disk that does
not take a record: the file is then as it was.
"""

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from nanoswe_proxy.errors import LogError

MAGIC = b"nanoswe-session/3\n"
_HEAD = struct.Struct("<I8s")
Record = tuple[dict, bytes]  # one change of a session: its fields, and raw columns


@dataclass(frozen=True)
class Contents:
    """What a file holds up to `size`; `torn` says that bytes follow which are no record."""

    records: list[Record]
    size: int
    chain: bytes
    torn: bool


class Log:
    """One file, open for appending after what was `found` in it: a torn tail is cut off."""

    def __init__(self, path: Path, found: Contents | None = None) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._chain, self._size = (found.chain, found.size) if found else (b"", 0)
        os.ftruncate(self._fd, self._size)
        if not self._size:
            self._write(MAGIC)

    def append(self, fields: dict, blob: bytes = b"") -> None:
        """Hand the record to the operating system: killing the process does not lose it."""
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        payload = text.encode() + b"\0" + blob
        chain = _link(self._chain, payload)
        self._write(_HEAD.pack(len(payload), chain) + payload)
        self._chain = chain

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, frame: bytes) -> None:
        try:
            written = os.pwrite(self._fd, frame, self._size)
            if written < len(frame):
                raise OSError(f"only {written} of {len(frame)} bytes fit")
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise LogError(f"{self.path}: {error}") from error
        self._size += len(frame)


def read(path: Path) -> Contents:
    """Every whole record of the file, in order."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return Contents([], 0, b"", bool(data))
        raise LogError(f"{path} is no session log of this version, {MAGIC.decode().strip()}: "
                       "replay an older one with what wrote it, and move it away")  # fmt: skip
    records, chain, at = [], b"", len(MAGIC)
    while at < len(data):
        start = at + _HEAD.size
        if start > len(data):
            break
        length, check = _HEAD.unpack_from(data, at)
        payload = data[start : start + length]
        if len(payload) < length or _link(chain, payload) != check:
            break
        text, _, blob = payload.partition(b"\0")
        records.append((json.loads(text), blob))
        chain, at = check, start + length
    return Contents(records, at, chain, at < len(data))


def _link(chain: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8, key=chain).digest()
