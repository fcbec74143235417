"""Recipes are strict, and say what is wrong in one line."""

from collections import Counter
from pathlib import Path

import pytest

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.recipe import Recipe, TasksSection, dump_recipe, load_recipe

MINIMAL = "name: a\ntasks: {path: tasks/nano/heldout}\n"


def _load(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> Recipe:
    (tmp_path / "r.yaml").write_text(text)
    return load_recipe(tmp_path / "r.yaml", overrides, Recipe)


def test_overrides_and_round_trip(tmp_path: Path) -> None:
    recipe = _load(
        tmp_path, MINIMAL, "eval.attempts=8", "eval.k=[1, 8]", "model.name=x=y", "tasks.limit=null"
    )
    assert (recipe.eval.attempts, recipe.eval.k, recipe.model.name) == (8, (1, 8), "x=y")
    assert _load(tmp_path, dump_recipe(recipe)) == recipe


def test_a_recipe_is_hashable(tmp_path: Path) -> None:
    """Where trials of a node share a process, it is the key."""
    given = "model={base_url: http://x, sampling: {top_p: 0.9, extra: {thinking: false}}}"
    one, other = (_load(tmp_path, MINIMAL, given) for _ in range(2))
    assert len({one, other, _load(tmp_path, MINIMAL)}) == 2
    assert one.model.config(0).sampling["top_p"] == 0.9


def test_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    assert _load(tmp_path, MINIMAL, "model.temperature=1e-6").model.temperature == 1e-6
    assert _load(tmp_path, MINIMAL + "model: {temperature: 2e-1}").model.temperature == 0.2


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (MINIMAL, "eval.atempts=3", "unknown key eval.atempts; did you mean attempts?"),
        (MINIMAL, "evl.k=3", "unknown key evl; did you mean eval?"),
        (MINIMAL, "zzz=3", "unknown key zzz; known here: name, seed"),
        (MINIMAL, "eval.attempts=lots", "eval.attempts: Input should be a valid integer"),
        (MINIMAL, "eval.attempts=0", "greater than or equal to 1"),
        (MINIMAL, "eval.attempts", "want section.key=value"),
        (MINIMAL, "name.x=1", "name is a value, not a section"),
        (MINIMAL, "name=../up", "name: String should match"),
        (
            MINIMAL,
            "model={base_url: http://x, sampling: {seed: 3}}",
            "sampling.seed: it has a key of its",
        ),
        (MINIMAL, "model.sampling={top_p: 0.9}", "sampling goes to model.base_url"),
        (MINIMAL, "sandbox.kind=chroot", "sandbox.kind: Input should be 'auto'"),
        ("name: a\n", "seed=1", "tasks: Field required"),
        ("- a\n", "seed=1", "not a mapping"),
        ("a: [\n", "seed=1", "not YAML"),
    ],
)
def test_wrong_recipes(tmp_path: Path, text: str, override: str, message: str) -> None:
    with pytest.raises(EvalkitError) as caught:
        _load(tmp_path, text, override)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(EvalkitError, match="cannot be read"):
        load_recipe(tmp_path / "no.yaml", [], Recipe)


def test_a_limit_gives_each_repository_its_share() -> None:
    tasks = [f"{repo}-{i:03}" for repo, n in (("a", 100), ("b", 50), ("c", 10)) for i in range(n)]
    chosen = TasksSection(path=Path("x"), limit=16).chosen(tasks)
    assert Counter(task[0] for task in chosen) == {"a": 10, "b": 5, "c": 1}
    assert len(set(chosen)) == 16
    assert TasksSection(path=Path("x"), limit=999).chosen(tasks) == tasks
    assert TasksSection(path=Path("x")).chosen(tasks) == tasks
