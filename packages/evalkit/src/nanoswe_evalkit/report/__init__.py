"""The report of a run: its folder in, report.html out, one file that loads nothing from anywhere.

The page draws itself from the facts of facts.py, embedded as JSON. Whatever a model or a test wrote
is only ever text: `<` is escaped in the JSON, the script makes text nodes, and a content security
policy forbids the rest. Refuses (EvalkitError) what facts.py refuses.
"""

import html
import json
import re
from pathlib import Path

from nanoswe_evalkit.report.facts import gather

ASSETS = {"css": "page.css", "charts": "charts.js", "viewer": "viewer.js", "script": "page.js"}
ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}  # nothing ends the script element


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html and return its path. The same records give the same bytes."""
    facts, here = gather(run_dir), Path(__file__).parent
    data = json.dumps(facts, allow_nan=False, separators=(",", ":")).translate(ESCAPES)
    filling = {name: (here / asset).read_text(encoding="utf-8") for name, asset in ASSETS.items()}
    filling |= {"title": html.escape(facts["name"]), "data": data}
    page = (here / "page.html").read_text(encoding="utf-8")
    # One pass, so that a placeholder in the data stays what it is: text.
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: filling[found[1]], page)
    draft = run_dir / "report.tmp"
    draft.write_text(text, encoding="utf-8")
    return draft.replace(run_dir / "report.html")
