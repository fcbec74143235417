"""The tools behind `just`: docs/recipes.md is fresh, `bump` edits, keys stay secret."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nanoswe_evalkit.recipe import Recipe, load_recipe

ROOT = Path(__file__).parent.parent


def tool(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_page_is_fresh() -> None:
    page = tool(ROOT / "tools/docs.py").page()
    assert (ROOT / "docs/recipes.md").read_text() == page, "run `just docs`"
    found = re.search(r"^(\d+) keys in all\.$", page, re.MULTILINE)
    assert found and int(found[1]) <= 72  # the rule is about 60


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/eval/*.yaml")), ids=lambda p: p.stem)
def test_evaluation_recipes_are_valid(path: Path) -> None:
    assert load_recipe(path, [], Recipe).name == path.stem


@pytest.fixture
def bump(tmp_path: Path) -> Path:
    """tools/bump.py beside a copy of the proxy package; the proxy is at 0.1.0 there."""
    package = tmp_path / "packages/proxy"
    (package / "src/nanoswe_proxy").mkdir(parents=True)
    (package / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\n')
    (package / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n\n- First.\n")
    (package / "src/nanoswe_proxy/__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "tools").mkdir()
    return Path(shutil.copy(ROOT / "tools/bump.py", tmp_path / "tools"))


def test_bump_opens_a_version(bump: Path) -> None:
    command = [sys.executable, str(bump), "proxy", "0.2.0"]
    subprocess.run(command, check=True, capture_output=True)
    package = bump.parents[1] / "packages/proxy"
    assert 'version = "0.2.0"' in (package / "pyproject.toml").read_text()
    assert (package / "src/nanoswe_proxy/__init__.py").read_text() == '__version__ = "0.2.0"\n'
    history = "# Changelog\n\n## 0.2.0\n\n- \n\n## 0.1.0\n\n- First.\n"
    assert (package / "CHANGELOG.md").read_text() == history


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["proxy", "0.1.0"], "is not newer than 0.1.0"),
        (["proxy", "two"], "want X.Y.Z"),
        (["prxy", "0.2.0"], "there are proxy"),
        (["proxy"], "just bump PACKAGE VERSION"),
    ],
)
def test_bump_refuses_in_one_line(bump: Path, arguments: list[str], says: str) -> None:
    command = [sys.executable, str(bump), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1
    assert 'version = "0.1.0"' in (bump.parents[1] / "packages/proxy/pyproject.toml").read_text()


def test_doctor_says_that_a_key_is_set_and_not_what_it_is() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/doctor.py")],
        env={**os.environ, "WANDB_API_KEY": "not-for-your-eyes"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert re.search(r"^ok +WANDB_API_KEY +set$", done.stdout, re.MULTILINE)
    assert "not-for-your-eyes" not in done.stdout + done.stderr


def test_an_argument_of_just_is_never_read_by_a_shell() -> None:
    """`./just eval nano 'name=a;rm -rf x'` is one wrong name; "$INSTRUCTION" stays."""
    text = (ROOT / "justfile").read_text()
    assert "\nset positional-arguments" in text
    pasted = [line for line in text.splitlines() if line.startswith("    ") and "{{" in line]
    assert pasted and all(line.count("{{") == line.count("{{ quote(") for line in pasted), pasted
