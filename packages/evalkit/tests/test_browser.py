"""The report in a real browser: headless Chromium draws it without an error, and nothing acts."""

import re
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
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
    flags += ["--virtual-time-budget=10000"]  # the transcript is unpacked after the page is drawn
    command = ["chromium", *flags, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == [], said
    return done.stdout


def screenshot(page: Path) -> Image.Image:
    path = page.with_suffix(".png")
    browse(page, f"--screenshot={path}", "--window-size=1200,2400", "--hide-scrollbars")
    return Image.open(path).convert("RGB")


def colours(page: Path) -> dict[str, tuple[int, ...]]:
    """The page's own names of its colours, on a light ground."""
    found: dict[str, tuple[int, ...]] = {}
    for name, value in re.findall(r"--(\w+): #([0-9a-f]{6})", page.read_text(encoding="utf-8")):
        found.setdefault(name, tuple(bytes.fromhex(value)))
    return found


def count(shot: Image.Image, colour: tuple[int, ...]) -> int:
    colors = shot.getcolors(shot.size[0] * shot.size[1]) or []
    return sum(number for number, value in colors if value == colour)


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
    assert "The transcript of every trial is in it" in texts["footer"]
    shot = screenshot(page)
    # what draws itself is there to be seen: bars and curves in the colours of before and after
    for name in ("before", "after", "resolved"):
        assert count(shot, colours(page)[name]) > 300, name
    # and nothing is drawn beyond the edges: they show the page's own ground
    width, height = shot.size
    ground = shot.getpixel((2, height - 2))
    assert all(shot.getpixel((x, y)) == ground for x in (1, width - 2) for y in range(0, height, 7))


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
    assert "1 of 5 trials have no reward, more than 1%" in dom.texts["alarm"]
    assert dom.tags["script"] == 2 and not dom.tags["img"]
    shot = screenshot(page)
    assert count(shot, colours(page)["infra_error"]) > 100  # that line, in red
