"""Shared fixtures: a small nano dataset, and SWE-bench Verified (or the excerpt here)."""

from pathlib import Path

import pytest

from nanoswe_harbor.convert import convert_nano

HERE = Path(__file__).resolve().parent
EXCERPT = HERE / "data" / "verified_excerpt.jsonl"
ROOT = HERE.parents[2]
VERIFIED = ROOT.parent / "shared/data/swe_bench_verified/test-00000-of-00001.parquet"


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-eight tasks per split: each kind of bug twice."""
    out = tmp_path_factory.mktemp("tasks") / "nano"
    convert_nano(out, {"train": 28, "heldout": 28})
    return out


@pytest.fixture(scope="session")
def verified() -> tuple[Path, int]:
    """(source, rows): the whole of Verified where it is at hand, else three of its rows."""
    return (VERIFIED, 500) if VERIFIED.is_file() else (EXCERPT, 3)
