"""The page of a session: whole, self-contained, deaf to what tokens spell; in a real browser."""

import json
import re
import subprocess
from collections import Counter
from html.parser import HTMLParser

import httpx
import pytest
from live import session
from test_session import new_session, say

from nanoswe_proxy.engine.scripted import Script
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.view import page

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)> <!-- DATA'


def session_with_forks(renderer, text, turns=3):
    """A session whose agent goes on, goes back, and says something else."""
    session = new_session(renderer, max_context=100_000, max_tokens=400)
    wired = [{"role": "user", "content": f"look at {text}"}]
    for turn in range(turns):
        *_, said = say(session, wired, f"turn {turn}: {text}")
        wired = [*wired, said, {"role": "user", "content": f"then {turn}"}]
    say(session, [*wired[:2], {"role": "user", "content": "no, something else"}], "another way")
    return session


def embedded(html):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', html, re.DOTALL)[1])


def test_the_page_holds_every_token_and_nothing_of_the_web(renderer):
    session = session_with_forks(renderer, "x")
    html = page(session)
    data = embedded(html)
    assert [n["parent"] for n in data["nodes"]] == [-1, 0, 1, 2, 3, 4, 1, 6]
    for node, shown in zip(session.nodes, data["nodes"], strict=True):
        said = shown.get("said")
        assert sum(1 if said else t[2] for t in shown["tokens"]) == len(node.ids)
    assert data["nodes"][6]["fork"] == "observation_edited" and data["sealed"] is False
    assert data["nodes"][1]["tokens"][0][1:] == [round(session.nodes[1].logprobs[0], 4), 0]
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", html.replace("src=x", ""))
    session.seal()
    assert embedded(page(session))["sealed"] is True


def test_what_tokens_spell_is_data(renderer):
    html = page(session_with_forks(renderer, HOSTILE))
    assert html.count("<script") == 2 and html.count("</script>") == 2 and "<img" not in html
    nonce = re.search(r"script-src 'nonce-([^']+)'", html)[1]
    assert f'<script nonce="{nonce}">' in html and "NONCE" not in html
    text = "".join(t[0] for n in embedded(html)["nodes"] if n.get("said") for t in n["tokens"])
    assert HOSTILE in text


class Dom(HTMLParser):
    """What the browser made of the page: spans in `pre` by class, texts of other elements."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.spans: list[tuple[str, str, str]] = []  # class, what hovering shows, text
        self.texts: dict[str, list[str]] = {}
        self.tags: Counter[str] = Counter()
        self._open: list[tuple[str, dict]] = []
        self.feed(dom)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        if tag not in ("meta", "img", "br", "link"):
            self._open.append((tag, dict(attributes)))
        if tag == "span" and self._open[-2][0] == "pre":
            given = self._open[-1][1]
            self.spans.append((given["class"], given.get("data-tip") or given.get("title"), ""))

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, text):
        tag, given = self._open[-1] if self._open else ("", {})
        self.texts.setdefault(given.get("class") or tag, []).append(text)
        if tag == "span" and self._open[-2][0] == "pre":
            kind, tip, said = self.spans[-1]
            self.spans[-1] = (kind, tip, said + text)


@pytest.mark.interop
def test_a_browser_shows_every_token(folders, tmp_path):
    """Over HTTP, in headless Chromium: each sampled token with its logprob and version, context by
    provenance, forks with their reasons; and what tokens spell does nothing.
    """
    scripts = ["so left", Script(f"it says {HOSTILE}", split_seed=1, bump_after=2),
               Script("left right " * 9, close=False), "and now", "other"]  # fmt: skip
    with session(folders["bpe"], scripts, f"t.{HOSTILE}") as (live, cap, url):
        history = [{"role": "system", "content": "S"}, {"role": "user", "content": HOSTILE}]
        history += [{"role": "assistant", "content": "nobody sampled this"}, user("one")]
        for most, then in ((999, f"two {HOSTILE}"), (999, "three"), (20, "four")):
            history += [ask(url, history, most), user(then)]
        ask(url, history, 999)
        condensed = [*history[:2], user("a summary"), *history[-4:]]
        ask(url, condensed, 999)
        page_url = url.replace("/v1", "/view#open")
        dom = chromium(page_url, "--dump-dom").stdout
        chromium(page_url, f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1200,900")
        log, decode = live.engine.log, live.engine.tokenizer.decode
        rows = live.call(live.proxy.seal(cap)).samples
    found = Dom(dom)
    said = [(tip, text) for kind, tip, text in found.spans if kind == "s"]
    truth = [s for entry in log for s in entry.sampled]
    assert len(said) == len(truth) and {s.version for s in truth} == {0, 1}
    for (tip, text), s in zip(said, truth, strict=True):
        logprob, _, version = tip.removeprefix("logprob ").split(" · ")
        assert float(logprob) == round(s.logprob, 4) and version == f"version {s.version}"
        assert text == decode([s.token], skip_special_tokens=False)
    for kind in "cofry":
        counts = [int(tip.removesuffix(" tokens")) for k, tip, _ in found.spans if k == kind]
        texts = "".join(text for k, _, text in found.spans if k == kind)
        assert sum(counts) > 0 and texts, kind
    assert HOSTILE in "".join(text for kind, _, text in found.spans if kind == "o")
    assert "nobody sampled this" in "".join(t for kind, _, t in found.spans if kind == "f")
    assert found.texts["fork"] == ["assistant_edited", "condensed"] and len(rows) == 2
    assert found.texts["title"] == found.texts["h1"] == [f"t.{HOSTILE}"]
    assert found.tags["script"] == 2 and not found.tags["img"]
    assert (tmp_path / "shot.png").stat().st_size > 10_000


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def ask(url: str, history: list[dict], most: int) -> dict:
    body = {"messages": history, "max_tokens": most}
    answer = httpx.post(f"{url}/chat/completions", json=body).raise_for_status()
    return answer.json()["choices"][0]["message"]


@pytest.mark.interop
def test_a_browser_shows_a_long_session(folders, tmp_path):
    session = session_with_forks(Renderer(folders["bpe"]), HOSTILE, turns=60)
    (tmp_path / "view.html").write_text(page(session))
    found = Dom(chromium((tmp_path / "view.html").as_uri(), "--dump-dom").stdout)
    assert found.tags["summary"] == 122 and found.texts["fork"] == ["observation_edited"]
    assert "61 turns" in found.texts["span"][0]


def chromium(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
