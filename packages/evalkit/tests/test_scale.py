"""One process drives many trials: its memory stays small."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_model import call, fake_model


@pytest.mark.parametrize("trials", [9, pytest.param(66, marks=pytest.mark.soak)])
def test_one_process_drives_them_all(
    nano: Path, tmp_path: Path, trials: int, record_property: Callable[[str, object], None]
) -> None:
    """All at once, each of three turns with an output of 40 kB."""
    replies = [call("head -c 40000 /dev/urandom | base64"), call("cat README.md"), call("submit")]

    async def main() -> tuple[int, int]:
        async with fake_model(replies) as model:
            (tmp_path / "r.yaml").write_text(
                f"name: r\ntasks: {{path: {nano / 'train'}}}\nsandbox: {{kind: bwrap}}\n"
                f"model: {{base_url: {model.base_url}}}\n"
                f"eval: {{attempts: {trials // 3}, concurrency: {trials}}}\n"
            )
            command = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", str(tmp_path / "r.yaml")]
            process = subprocess.Popen(command, cwd=tmp_path, stdout=-3, stderr=-3)
            _, status, usage = await asyncio.to_thread(os.wait4, process.pid, 0)
            process.returncode = status
            return status, usage.ru_maxrss

    status, peak_kib = asyncio.run(main())
    assert status == 0
    lines = (tmp_path / "runs" / "r" / "trials.jsonl").read_text().splitlines()
    assert len(lines) == trials
    assert {json.loads(line)["outcome"] for line in lines} == {"no_patch"}
    record_property("peak_mib", peak_kib // 1024)
    assert peak_kib < 200 * 1024  # measured: 54 and 70 MiB
