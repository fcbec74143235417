"""Rows of a dataset on the Hugging Face hub: the only file that imports `datasets`.

In: a hub name. Out: (where, row) pairs of its test split, or else of its train split.
Refuses a name that cannot be loaded: SourceError, one line.
"""

from collections.abc import Iterator
from typing import Any

from nanoswe_harbor.sources import SourceError


def hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    """Stream a dataset, in the hub's order."""
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise SourceError("a hub name needs an extra: pip install 'nanoswe-harbor[hub]'") from error
    try:
        splits = datasets.load_dataset(name, streaming=True)
        split = "test" if "test" in splits else "train"
        for number, row in enumerate(splits[split]):
            yield f"{name}: {split} row {number}", row
    # The library raises its own kinds and those of four HTTP stacks; all mean the same here.
    except Exception as error:
        brief = " ".join(str(error).split())[:200]
        raise SourceError(f"{name}: not loaded from the hub ({brief}); give a file") from error
