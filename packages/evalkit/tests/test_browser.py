"""The report in a real browser: headless Chromium draws it without an error, and nothing acts."""

import re
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_report import HOSTILE, training_run, trial

from nanoswe_evalkit.outcome import Outcome
from nanoswe_evalkit.report import write_report
from nanoswe_evalkit.trial import to_line
from nanoswe_evalkit.verify import CERTIFICATES, Certificate, certificate_line

pytestmark = pytest.mark.interop
VOID = {"meta", "br", "input", "img", "link"}


class Dom(HTMLParser):
    """What the browser made of the page: tags, and the text of everything with an id or class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.texts = Counter[str](), dict[str, str]()
        self._open: list[tuple[str, list[str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        named = dict(attrs)
        keys = [named.get("id") or "", *(named.get("class") or "").split(), tag]
        if tag not in VOID:
            self._open.append((tag, keys))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for key in {key for _, keys in self._open for key in keys}:
            self.texts[key] = self.texts.get(key, "") + data


def browse(page: Path, *options: str) -> str:
    """The page's DOM once its scripts have run; an error in them fails."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command = ["chromium", *flags, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == [], said
    return done.stdout


def test_a_training_run(tmp_path: Path) -> None:
    page = write_report(training_run(tmp_path))
    dom = Dom(browse(page, "--dump-dom"))
    texts = dom.texts
    assert (
        "12 tasks · 200 trials" in texts["summary"]
        and "every trial has a reward" in texts["summary"]
    )
    assert "avg@4, 8 tasks" in texts["cards"] and "greedy accuracy" in texts["cards"]
    assert re.search(r"[+-]0\.\d\d \[", texts["gain"])
    assert "nano__heldout-0007" in texts["tasks"] and "4 of 4" in texts["tasks"]
    for label in ("after SFT", "after RL, greedy", "training"):
        assert label in texts["outcomes"], label
    assert "mean seconds of a trial: total 1.50" in texts["outcomes"]
    assert "the patch that was graded" in texts["viewer"] and "+new" in texts["viewer"]
    assert HOSTILE.replace("\n", "") in texts["viewer"]  # a token's text, shown as text
    assert dom.tags["svg"] >= 5 and dom.tags["script"] == 2 and not dom.tags["img"]
    shot = tmp_path / "shot.png"
    browse(page, f"--screenshot={shot}", "--window-size=1200,2400")
    assert shot.stat().st_size > 50_000


def test_an_evaluation_with_hostile_content(tmp_path: Path) -> None:
    """A patch, a log, a message, an error and a task's name that would be markup."""
    ends = [Outcome.RESOLVED, Outcome.UNRESOLVED, Outcome.TAMPER, Outcome.INFRA_ERROR]
    trials = [trial(f"a__b-{i}.0", f"a__b-{i}", 0, end) for i, end in enumerate(ends)]
    report: dict[str, Any] = {"reason": HOSTILE, "log": f"log {HOSTILE}"}
    facts = {"patch": f"--- a\n+++ b\n+{HOSTILE}\n", "error": HOSTILE, "report": report}
    lines = [to_line(trials[0]), *(to_line(type(t)(**{**vars(t), **facts})) for t in trials[1:])]
    lines.append(
        to_line(type(trials[0])(**{**vars(trials[0]), "task_id": HOSTILE, "trial_id": "x"}))
    )
    (tmp_path / "trials.jsonl").write_text("".join(lines))
    held = Certificate("a__b-1", "k", "bwrap", ("unresolved",), ("unresolved",), (HOSTILE,), ())
    (tmp_path / CERTIFICATES).write_text(certificate_line(held))
    page = write_report(tmp_path)
    dom = Dom(browse(page, "--dump-dom"))
    assert "5 tasks · 5 trials" in dom.texts["summary"]
    assert "1 trials without a reward (our machinery failed)" in dom.texts["summary"]
    for word in ("avg@1", "no reward as failed", "by repository"):
        assert word in dom.texts["cards"], word
    assert "certificate" in dom.texts["tasks"] and "nothing resolves it" in dom.texts["tasks"]
    assert HOSTILE in dom.texts["tasks"] and HOSTILE in dom.texts["viewer"]
    assert dom.tags["script"] == 2 and not dom.tags["img"]
