"""Rows: demonstrations against a real trial, and trials with trajectories to a batch."""

import asyncio
import math
from collections import Counter
from pathlib import Path

import pytest
import yaml

from nanoswe_evalkit.outcome import Outcome, Stop
from nanoswe_evalkit.sandboxes import pick
from nanoswe_evalkit.trial import Trial
from nanoswe_harbor.convert import convert_nano
from nanoswe_harbor.nano import cases
from nanoswe_harbor.task import load_task
from nanoswe_proxy.engine.scripted import ScriptedEngine
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.trajectory import Conservation, Sample, Trajectory
from nanoswe_trainer.data import conversation, demonstrations, rl_rows, sft_rows
from nanoswe_trainer.recipe import TrainRecipe, TrainSection
from nanoswe_trainer.rollout import open_rollouts
from nanoswe_trainer.tiny import TEMPLATE

NAN = math.nan
PARTS = yaml.safe_load(TEMPLATE.with_suffix(".yaml").read_text())


def recipe(folder: Path) -> TrainRecipe:
    return TrainRecipe.model_validate({"name": "test", "tasks": {"path": folder / "train"}})


def test_a_demonstration_is_token_for_token_what_a_real_trial_samples(
    model_dir: Path, tmp_path: Path
) -> None:
    """Real agent, proxy, sandbox and tests; only the choice of tokens is scripted."""
    convert_nano(tmp_path, {"train": 3, "heldout": 1})
    renderer = Renderer(model_dir)
    want = {}
    for case in cases("train", 3, 0):
        want[case.instance_id] = renderer.render_messages(conversation(case, case.good), None)

    async def one(name: str) -> tuple[Trial, Trajectory]:
        turns = [renderer.codec.decode(p.ids) for p in want[name] if set(p.provenance) == {"s"}]
        scripts = [t.removesuffix("<|im_end|>") for t in turns]
        work = tmp_path / "work"
        kind, engine = await pick("auto", work), ScriptedEngine(model_dir, scripts)
        task = load_task(tmp_path / "train" / name)
        async with open_rollouts(
            recipe(tmp_path), engine, renderer, kind, work
        ) as rollouts:  # fmt: skip
            trials, trajectories = await rollouts.run([task], 1, "t", temperature=1.0)
        return trials[0], trajectories[trials[0].trial_id]

    for name, parts in want.items():
        trial, trajectory = asyncio.run(one(name))
        assert (trial.stop, trial.outcome, trial.reward) == (Stop.FINISHED, Outcome.RESOLVED, 1.0)
        (sample,) = trajectory.samples
        assert sample.tokens == tuple(t for p in parts for t in p.ids)
        assert sample.mask == tuple(k == "s" for p in parts for k in p.provenance)


def test_words_are_one_token_and_every_text_survives(model_dir: Path) -> None:
    codec = Renderer(model_dir).codec
    case = next(cases("heldout", 1, 0))
    ids = codec.full.encode(case.name, add_special_tokens=False).ids
    assert len(ids) == 3  # verb, underscore, thing
    for text in (
        "naïve — ünïcode\t\r\n",
        case.file_text,
        "<|im_start|> in a file",
        PARTS["structure"][6],
    ):
        encoded = codec.encode(codec.guard(text), "c", "o")
        assert codec.decode(encoded.ids) == text
        structural = {codec.full.token_to_id(s) for s in PARTS["structure"]}
        assert structural.isdisjoint(encoded.ids)


def test_demonstrations_are_wrong_as_often_as_asked_and_never_on_a_task() -> None:
    shown = list(demonstrations(4200, 0, (0.6, 0.2)))
    wrong = Counter(case.kind for case, expression in shown if expression == case.tempting)
    rates = [wrong[kind] / 300 for kind in dict.fromkeys(case.kind for case, _ in shown)]
    assert all(abs(rate - (0.6, 0.2)[i % 2]) < 0.1 for i, rate in enumerate(rates))
    assert all(expression in (case.good, case.tempting) for case, expression in shown)
    heldout = {f.name for case in cases("heldout", 100, 0) for f in case.functions}
    assert heldout.isdisjoint(f.name for case, _ in shown for f in case.functions)


def test_sft_weights_sum_to_one_and_context_weighs_a_tenth(model_dir: Path) -> None:
    renderer = Renderer(model_dir)
    parts = [
        renderer.render_messages(conversation(case, case.good), None)
        for case in cases("train", 2, 1)
    ]
    rows = sft_rows(parts, 0.1)
    assert sum(sum(row.weights) for row in rows) == pytest.approx(1.0)
    kinds = "".join(p.provenance for p in parts[0])
    sampled = rows[0].weights[kinds.index("s")]
    assert rows[0].weights[0] == 0.0
    assert rows[0].weights[1] == pytest.approx(0.1 * sampled)


def trial(group: int, attempt: int, reward: float | None, stop: Stop = Stop.FINISHED) -> Trial:
    outcome = {1.0: Outcome.RESOLVED, 0.0: Outcome.UNRESOLVED, None: Outcome.INFRA_ERROR}[reward]
    return Trial(
        f"s.{group}.{attempt}", str(group), attempt, 0, stop, outcome, reward, 1, "", None, {}
    )


def trajectory(trial_id: str, sampled: int) -> Trajectory:
    n = 2 + sampled
    sample = Sample(
        tokens=tuple(range(n)), provenance="oc" + "s" * sampled,
        logprobs=(NAN, NAN, *[-1.0] * sampled),
        versions=(-1, -1, *[0] * sampled), turns=(-1, -1, *[0] * sampled), stops={0: "stop"},
    )  # fmt: skip
    return Trajectory(trial_id, 0, trial_id, 1.0, (), (sample,), Conservation(sampled, sampled, {}))


def test_a_batch_by_hand() -> None:
    groups = [
        [trial(0, 0, 1.0), trial(0, 1, 0.0), trial(0, 2, None), trial(0, 3, 0.0, Stop.MAX_TURNS)],
        [trial(1, 0, 1.0), trial(1, 1, 1.0), trial(1, 2, 1.0), trial(1, 3, 1.0)],
    ]
    every = {t.trial_id: trajectory(t.trial_id, 3 + t.attempt) for g in groups for t in g}
    train = TrainSection()
    batch = rl_rows(groups, every, train, 64)
    assert [row.advantages[0] for row in batch.rows] == [0.5, -0.5]
    assert [row.weights for row in batch.rows] == [(0, 0, *[1 / 7] * 3), (0, 0, *[1 / 7] * 4)]
    assert batch.rewards == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert batch.counts["groups_all_1"] == 1
    penalised = rl_rows(groups, every, TrainSection(truncated="penalise"), 64)
    assert [row.advantages[0] for row in penalised.rows] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    del every[groups[0][0].trial_id]
    with pytest.raises(LookupError, match="no trajectory"):
        rl_rows(groups, every, train, 64)
    assert not rl_rows([groups[1]], every, train, 64).rows
