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
from nanoswe_trainer.model import (
    Decoder,
    ModelConfig,
    ModelError,
    initialise,
    read_config,
    save_decoder,
)  # fmt: skip
from nanoswe_trainer.pack import Row
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.worker import nll, open_worker

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


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_what_lasts_is_what_a_worker_holds(place: Path, kl: float) -> None:
    save_decoder(initialise(ModelConfig(vocab_size=400), 0), place / "m")
    recipe = TrainRecipe(name="r", tasks={"path": "."}, train={"kl": kl})
    worker = open_worker(recipe, place / "m")
    worker.begin(learning_rate=1e-6, reference=place / "m" if kl else None)
    worker.step([Row((1, 2, 3), (0.0, 1.0, 1.0))], nll)
    decoders = list(filter(None, (worker.decoder, worker.reference)))
    held = [p for decoder in decoders for p in decoder.parameters()]
    held += list(worker.decoder.parameters())  # a gradient each, in a step
    for state in worker.optimizers[0].state.values():
        held += [value for name, value in state.items() if name != "step"]
    assert memory(recipe, worker.decoder)[0] == 4 * sum(tensor.numel() for tensor in held)


def test_a_teacher_counts_at_its_own_size(place: Path) -> None:
    for name, layers in (("m", 1), ("t", 5)):
        save_decoder(Decoder(ModelConfig(vocab_size=400, num_hidden_layers=layers)), place / name)
    with torch.device("meta"):
        small, large = (Decoder(read_config(place / name)) for name in ("m", "t"))
    count = [sum(p.numel() for p in decoder.parameters()) for decoder in (small, large)]
    train = {"preset": "distill", "teacher": place / "t"}
    recipe = TrainRecipe(name="r", tasks={"path": "."}, train=train)
    assert memory(recipe, small)[0] == 16 * count[0] + 4 * count[1]


def test_a_torn_configuration_is_one_line(place: Path) -> None:
    (place / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"config\.json: not a model's configuration"):
        read_config(place)
