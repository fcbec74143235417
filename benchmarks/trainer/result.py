"""What a benchmark found: JSON on stdout, and in the file that --out names."""

import json
import sys
from pathlib import Path


def tell(result: dict, out: Path | None) -> None:
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if out:
        out.write_text(text)
