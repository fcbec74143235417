"""The page of a session: whole, self-contained, deaf to what tokens spell; in a real browser."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from test_session import new_session, say

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


@pytest.mark.soak  # by hand: it needs Debian's chromium
def test_a_browser_shows_it(renderer, tmp_path):
    file = tmp_path / "view.html"
    file.write_text(page(session_with_forks(renderer, HOSTILE, turns=60)))
    dom = chromium(file, "--dump-dom").stdout
    assert "<title>t.0</title>" in dom
    assert dom.count("<summary>") == 122 and dom.count('class="branch"') == 1
    assert "observation_edited" in dom and "61 turns" in dom
    assert "<img" not in dom and "owned</title>" not in dom
    chromium(file, f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1200,900")
    assert (tmp_path / "shot.png").stat().st_size > 10_000


def chromium(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
