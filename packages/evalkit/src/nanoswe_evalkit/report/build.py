"""`write_report`: a run folder in, its report.html out, one file that loads nothing from anywhere.

The page draws itself from the facts of facts.py, embedded as JSON. Whatever a model or a test wrote
is only ever text: `<` is escaped in the JSON, the script makes text nodes, and a content security
policy forbids the rest. Refuses (EvalkitError) what facts.py refuses.
"""

import html
import json
import re
from importlib import resources
from pathlib import Path

from nanoswe_evalkit.report.facts import gather

ASSETS = ("page.html", "page.css", "charts.js", "viewer.js", "page.js")


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html and return its path. The same records give the same bytes."""
    facts = gather(run_dir)
    folder = resources.files("nanoswe_evalkit.report")
    page, *parts = ((folder / name).read_text(encoding="utf-8") for name in ASSETS)
    filling = {"title": html.escape(facts["name"]), "data": _json(facts)}
    filling |= dict(zip(("css", "charts", "viewer", "script"), parts, strict=True))
    # One pass, so that a placeholder in the data stays what it is: text.
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: filling[found[1]], page)
    path = run_dir / "report.html"
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return path


def _json(facts: dict[str, object]) -> str:
    """ASCII JSON that cannot end the script element it stands in."""
    text = json.dumps(facts, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
