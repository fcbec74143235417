"""The report: one file from a run folder's records, in which no text of a run can act as markup."""

import base64
import gzip
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nanoswe_evalkit.outcome import EvalkitError, Outcome, Stop, reward_of
from nanoswe_evalkit.report import facts as report_facts
from nanoswe_evalkit.report import write_report
from nanoswe_evalkit.report.facts import gather
from nanoswe_evalkit.trial import Trial, to_line
from nanoswe_evalkit.verify import CERTIFICATES, Certificate, certificate_line

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{data}} & \u2028"
TEXTS = ["", "<|im_start|>user\n", "return ", HOSTILE, "cat stock.py", "<|im_end|>"]
PHRASES = ("the sum of left and right", "whether left is at least right")


def trial(trial_id: str, task: str, attempt: int, outcome: Outcome, kind: int = 0) -> Trial:
    issue = f"merge_rate(left, right) in stock.py must return {PHRASES[kind]}."
    patch = "" if outcome is Outcome.NO_PATCH else "--- a/stock.py\n+++ b/stock.py\n-old\n+new\n"
    return Trial(
        trial_id, task, attempt, 0, Stop.FINISHED, outcome, reward_of(outcome), 2, patch,
        {"reason": "", "fail_to_pass": {"success": ["a"], "failure": []}}, {"total_sec": 1.5},
        messages=({"role": "user", "content": issue}, {"role": "assistant", "content": HOSTILE}),
    )  # fmt: skip


def trajectory(trial_id: str) -> dict[str, Any]:
    row = {
        "tokens": [1, 3, 4, 5, 1, 2, 5], "provenance": "cossocs",
        "logprobs": [None, None, -0.25, -0.5, None, None, -0.125],
        "versions": [-1, -1, 3, 3, -1, -1, 4], "turns": [-1, -1, 0, 0, -1, -1, 1],
    }  # fmt: skip
    return {"schema": "trajectory/1", "trial_id": trial_id, "samples": [row]}


def training_run(folder: Path, tasks: int = 8, attempts: int = 4, steps: int = 30) -> Path:
    """What a training run leaves: two evaluations, sampled and greedy, and steps between them."""
    rng = random.Random(0)
    verdict = {True: Outcome.RESOLVED, False: Outcome.UNRESOLVED}
    trials = []
    for step, chance in ((0, 0.4), (steps, 0.95)):
        for i in range(tasks):
            for prefix, count in (("e", attempts), ("g", 1)):
                for n in range(count):
                    task, outcome = f"nano__heldout-{i:04}", verdict[rng.random() < chance]
                    name = f"{prefix}{step:05}.{task}.{n}"
                    trials.append(trial(name, task, n, outcome, i % 2))
    metrics: list[dict[str, Any]] = [
        {"stage": "sft", "step": step, "loss": 4 * 0.98**step, "grad_norm": rng.random()}
        for step in range(1, 201)
    ]
    for step, value in ((0, 0.4), (steps, 0.95)):
        score = {"avg_at_k": value, "avg_low": value - 0.1, "avg_high": min(1, value + 0.05)}
        for greedy in (False, True):
            metrics.append({"stage": "eval", "step": step, "greedy": greedy, **score})
    for step in range(1, steps + 1):
        for i in range(4):
            task, lucky = f"nano__train-{i:04}", rng.random() < 0.4 + 0.5 * step / steps
            trials.append(trial(f"s{step:05}.{task}.{i}", task, i, verdict[lucky]))
        reward = 0.4 + 0.5 * step / steps + rng.gauss(0, 0.04)
        extra = {"entropy": 0.3 - 0.005 * step, "grad_norm": rng.random(), "kl": float("nan")}
        metrics.append({"stage": "rl", "step": step, "reward_mean": reward, **extra})
    with (folder / "trials.jsonl").open("w") as file:
        file.writelines(map(to_line, trials))
    with (folder / "trajectories.jsonl").open("w") as file:
        file.writelines(json.dumps(trajectory(t.trial_id)) + "\n" for t in trials)
    with (folder / "metrics.jsonl").open("w") as file:
        for i, row in enumerate(metrics):
            file.write(json.dumps({"schema": "metrics/1", "time_sec": float(i), **row}) + "\n")
    (folder / "tokens.json").write_text(json.dumps(TEXTS))
    (folder / "recipe.yaml").write_text("name: demo <b>&\nseed: 0\n")
    return folder


class Tags(HTMLParser):
    """Counts elements as a browser would find them, and keeps the text of the embedded data."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.data = ""
        self._data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href")]
        self._data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._data else ""
        self._data = False


def test_page_is_one_file_in_which_no_text_acts(tmp_path: Path) -> None:
    page = write_report(training_run(tmp_path)).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert tags.names.count("script") == 2
    assert "img" not in tags.names
    assert tags.links == []
    assert "default-src 'none'" in page
    assert "<title>demo &lt;b&gt;&amp; · nano-swe</title>" in page
    facts = json.loads(tags.data)
    assert facts["vocabulary"]["3"] == HOSTILE
    script = page.split('id="data">')[1].split("</script>", 1)[1]
    for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert risky not in script
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script)


def test_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_report(training_run(tmp_path)).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_facts_of_a_training_run(tmp_path: Path) -> None:
    facts = gather(training_run(tmp_path))
    assert [p["id"] for p in facts["phases"]] == ["e00000", "e00030", "g00000", "g00030", "train"]
    assert [card["label"] for card in facts["scores"]] == ["avg@4", "pass@4", "greedy accuracy"]
    average = facts["scores"][0]
    before, after = average["values"]
    assert average["gain"]["value"] == pytest.approx(after["value"] - before["value"])
    assert before["low"] < before["value"] < before["high"]
    task = facts["tasks"][1]
    assert (task["kind"], task["counts"]["e00000"][0]) == ("least", 4)
    assert "kl" not in facts["series"]["rl"]  # NaN cannot be drawn
    assert facts["series"]["rl"]["entropy"][0] == [1, pytest.approx(0.295)]


def unpacked(shown: dict[str, Any]) -> dict[str, Any]:
    """As the page does it."""
    told: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(shown["packed"])))
    assert {k: told[k] for k in told.keys() & shown.keys()}.items() <= shown.items()
    return told


def test_every_trial_is_in_it_the_first_by_their_tokens(tmp_path: Path) -> None:
    facts = gather(training_run(tmp_path, tasks=40, attempts=8))
    shown = [unpacked(each) for each in facts["shown"]]
    assert len(shown) == len({each["trial_id"] for each in shown}) == facts["trials"] > 700
    row = shown[0]["rows"][0]
    assert (row["ends"], row["versions"], row["logprobs"][2]) == ([4, 7], [3, 4], -0.25)
    assert shown[0]["messages"] == []
    assert [bool(each["rows"]) for each in shown] == [True] * 200 + [False] * (len(shown) - 200)
    assert all(each["rows"] or len(each["messages"]) == 2 for each in shown)


def test_where_not_all_fit_every_phase_and_all_of_training_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_report(training_run(tmp_path, tasks=20, attempts=4)).stat().st_size
    monkeypatch.setattr(report_facts, "MAX_BYTES", 40_000)
    facts = gather(tmp_path)
    assert 40 < len(facts["shown"]) < facts["trials"] // 2
    assert {each["phase"] for each in facts["shown"]} == {p["id"] for p in facts["phases"]}
    steps = {each["trial_id"][:6] for each in facts["shown"] if each["phase"] == "train"}
    assert min(steps) < "s00010" and max(steps) > "s00020"
    pairs = [
        {(each["task_id"], each["attempt"]) for each in facts["shown"] if each["phase"] == phase}
        for phase in ("e00000", "e00030")
    ]
    assert len(pairs[0] ^ pairs[1]) <= 1
    assert write_report(tmp_path).stat().st_size < page


def test_bare_evaluation_shows_messages(tmp_path: Path) -> None:
    trials = [
        trial(f"t{i}.0", f"t{i}", 0, o)
        for i, o in enumerate((Outcome.RESOLVED, Outcome.INFRA_ERROR))
    ]
    (tmp_path / "trials.jsonl").write_text("".join(map(to_line, trials)))
    facts = gather(tmp_path)
    assert (facts["name"], facts["noReward"]) == (tmp_path.name, 1)
    assert (
        facts["scores"][0]["values"][0]["value"] == 1.0
    )  # the trial without a reward is not in it
    assert [m["role"] for m in unpacked(facts["shown"][0])["messages"]] == ["user", "assistant"]
    assert write_report(tmp_path).stat().st_size < 100_000


def test_certificates_have_a_card_and_name_what_is_doubtful(tmp_path: Path) -> None:
    ends = [Outcome.RESOLVED, Outcome.UNRESOLVED, Outcome.UNRESOLVED]
    trials = [trial(f"a__b-{i}.0", f"a__b-{i}", 0, end) for i, end in enumerate(ends)]
    (tmp_path / "trials.jsonl").write_text("".join(map(to_line, trials)))
    good, bad = (("resolved",), ("no_patch",)), (("unresolved",), ("no_patch",))
    lists: dict[str, Any] = {"wrong_labels": ("t.py::bad",), "flaky_tests": ()}
    held = [Certificate(f"a__b-{i}", "k", "bwrap", *(good, bad)[i], **lists) for i in range(2)]
    (tmp_path / CERTIFICATES).write_text("".join(map(certificate_line, held)))
    facts = gather(tmp_path)
    cards = {card["label"]: card["values"][0] for card in facts["scores"]}
    sure = cards["avg@1, certified"]
    assert (sure["value"], sure["tasks"], cards["avg@1"]["tasks"]) == (1.0, 1, 3)
    named = [(task.get("certificate"), task.get("doubts")) for task in facts["tasks"]]
    assert named == [
        ("certified", ["t.py::bad"]), ("nothing resolves it", ["t.py::bad"]), (None, None)
    ]  # fmt: skip


def test_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(EvalkitError, match="no trials.jsonl"):
        write_report(tmp_path)
    training_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"schema": "metrics/9"}\n')
    with pytest.raises(EvalkitError, match="metrics.jsonl:1: .*not of schema metrics/1"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_without_the_texts_of_its_tokens_a_trial_shows_its_messages(tmp_path: Path) -> None:
    training_run(tmp_path, tasks=1, attempts=1, steps=1)
    assert gather(tmp_path)["vocabulary"] == {i: TEXTS[i] for i in range(1, 6)}
    # a model's vocabulary is padded, and an untrained one samples ids that no text has
    (tmp_path / "tokens.json").write_text(json.dumps(TEXTS[:5]))
    assert gather(tmp_path)["vocabulary"][5] == "⟨5⟩"
    (tmp_path / "tokens.json").unlink()
    facts = gather(tmp_path)
    shown = [unpacked(each) for each in facts["shown"]]
    assert facts["vocabulary"] == {} and not any(each["rows"] for each in shown)
    assert all(len(each["messages"]) == 2 for each in shown)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("trials.jsonl", {"timings": None}, "trials.jsonl:1: not readable .*timings"),
        ("trials.jsonl", {"reward": "x"}, "trials.jsonl:1: not readable .*reward"),
        ("trials.jsonl", {"report": {"runs": [{"log": "?"}]}}, "the stored log is damaged"),
        ("metrics.jsonl", '{"schema": "metrics/1"}\n', "metrics.jsonl:1: not readable .*step"),
        ("trajectories.jsonl", '{"schema": "trajectory/1"}\n', "trajectories.jsonl:1: .*trial_id"),
        ("tokens.json", "{", "tokens.json: not a list"),
        ("recipe.yaml", "- a", "recipe.yaml: not a run's recipe"),
        ("recipe.yaml", "seed: abc", "recipe.yaml: not a run's recipe"),
        ("recipe.yaml", "when: 2020-13-45", "recipe.yaml: not a run's recipe"),
        ("certificates.jsonl", '{"schema": "certificate/1", "gold": null}\n', "jsonl:1: .*remove"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: Any, told: str) -> None:
    training_run(tmp_path, tasks=1, attempts=1, steps=1)
    path = tmp_path / name
    if isinstance(text, dict):
        first, *rest = path.read_text().splitlines(keepends=True)
        text = "".join([json.dumps(json.loads(first) | text) + "\n", *rest])
    path.write_text(text)
    with pytest.raises(EvalkitError, match=told):
        write_report(tmp_path)


def test_too_many_lost_trials_are_said_above_all_figures(tmp_path: Path) -> None:
    ends = [Outcome.RESOLVED] * 98 + [Outcome.INFRA_ERROR] * 2
    trials = [trial(f"a__b-{i}.0", f"a__b-{i}", 0, end) for i, end in enumerate(ends)]
    (tmp_path / "trials.jsonl").write_text("".join(map(to_line, trials)))
    assert "2 of 100 trials have no reward, more than 1%" in gather(tmp_path)["noHeadline"]
    (tmp_path / "trials.jsonl").write_text("".join(map(to_line, trials[:99])))
    assert "1 of 99" in gather(tmp_path)["noHeadline"]
    (tmp_path / "trials.jsonl").write_text("".join(map(to_line, trials[:98])))
    assert gather(tmp_path)["noHeadline"] == ""
