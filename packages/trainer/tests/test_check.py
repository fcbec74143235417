"""Every recipe validates and dry-runs; what a machine lacks is one line each."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from nanoswe_evalkit.recipe import load_recipe
from nanoswe_harbor.convert import convert_nano
from nanoswe_trainer.check import GIB, memory
from nanoswe_trainer.cli import cli
from nanoswe_trainer.model import Decoder, ModelConfig, read_config, save_decoder
from nanoswe_trainer.recipe import TrainRecipe

RECIPES = sorted(Path(__file__).parents[3].glob("recipes/*/*.yaml"))
RECIPES = [path for path in RECIPES if path.parent.name in ("train", "sft")]
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, where a recipe's relative paths lead nowhere."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(path: Path, *overrides: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(cli, ["check", str(path), *overrides])
    return done.exit_code, done.output.splitlines()


def missing(lines: list[str]) -> list[str]:
    return [line.removeprefix("# MISSING: ") for line in lines if line.startswith("# MISSING")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_recipe_validates_and_says_what_this_machine_lacks(path: Path, place: Path) -> None:
    code, lines = check(path)
    names = load_recipe(path, [], TrainRecipe)
    assert names.name in (path.stem, f"sft-{path.stem}")
    lacks = missing(lines)
    assert code == 1 and lacks and len(lacks) == len(set(lacks))
    said = "\n".join(lacks)
    if names.has_trials:
        assert f"{names.tasks.path}: no such folder" in said
    for path_ in filter(None, (names.init, *names.sft.data)):
        assert str(path_) in said
    head = path.read_text().split("\nname:")[0]
    assert path.stem in ("demo", "nano") or ("Hardware" in head and "not run" in head.lower())


@pytest.mark.parametrize("name", ["swegym", "swegym-1gpu", "swegym-2nodes"])
def test_a_recipe_dry_runs_where_all_but_the_gpus_is_there(name: str, place: Path) -> None:
    path = next(p for p in RECIPES if (p.parent.name, p.stem) == ("train", name))
    recipe = load_recipe(path, [], TrainRecipe)
    convert_nano(place / "tasks/nano", {"train": 3, "heldout": 2})
    (place / "tasks/nano/train").rename(place / "tasks/swegym")
    (place / "tasks/nano/heldout").rename(place / "tasks/verified-50")
    assert recipe.init
    recipe.init.mkdir(parents=True)
    (recipe.init / "config.json").write_text(json.dumps(QWEN3_8B))
    for file in (recipe.init / "tokenizer.json", recipe.init / "model-1.safetensors",
                 Path(".vllm/bin/python"), Path(".openhands/bin/python")):  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    code, lines = check(path)
    gpus = torch.cuda.device_count()
    want = [] if gpus >= recipe.cluster.ranks else [f"{recipe.cluster.ranks} GPUs for the ranks"]
    assert [line[: len(w)] for line, w in zip(missing(lines), want, strict=True)] == want
    assert code == bool(want)
    said = "\n".join(lines)
    assert "# 3 training tasks in tasks/swegym" in said
    assert "# 2 held-out tasks in tasks/verified-50" in said
    assert f"# {recipe.cluster.ranks} ranks" in said
    assert "8.19 B parameters" in said or (recipe.cluster.lora and "8.28 B" in said)


def test_the_estimate_by_hand(place: Path) -> None:
    """Qwen3-8B: 8.19 B parameters, of which a rank of four has a fourth, at 16 bytes."""
    (place / "config.json").write_text(json.dumps(QWEN3_8B))
    with torch.device("meta"):
        decoder = Decoder(read_config(place))
    settings = {"ranks": 4, "bf16": True, "recompute": True, "max_tokens": 40960}
    recipe = TrainRecipe(name="r", tasks={"path": "."}, cluster=settings)
    lasting, passing = memory(recipe, decoder)
    assert lasting == pytest.approx(16 * 8.19e9 / 4, rel=0.01)
    blocks = 36 * 4096 * 40960 * 2  # the input of each block
    assert blocks < passing < 25 * GIB
    plain = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(
        update={"recompute": False})})  # fmt: skip
    assert memory(plain, decoder)[1] > 10 * passing


def test_what_lasts_is_what_a_worker_holds(place: Path) -> None:
    config = ModelConfig(vocab_size=400)
    decoder = Decoder(config)
    save_decoder(decoder, place / "m")
    recipe = TrainRecipe(name="r", tasks={"path": "."})
    count = sum(p.numel() for p in decoder.parameters())
    assert memory(recipe, decoder)[0] == 16 * count
    with_kl = TrainRecipe(name="r", tasks={"path": "."}, train={"kl": 0.1})
    assert memory(with_kl, decoder)[0] == 20 * count
