"""Fixtures: a random tiny decoder with a real tokenizer, and one compute thread."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from nanoswe_trainer import tiny
from nanoswe_trainer.model import Decoder, ModelConfig, initialise, load_decoder

# In environments of their own: `nox --session vllm`, `nox --session parity`.
OF_AN_ENVIRONMENT = {"vllm": "test_vllm.py", "trl": "test_parity.py", "ray": "test_ray.py"}
collect_ignore = [file for module, file in OF_AN_ENVIRONMENT.items() if not find_spec(module)]
settings.register_profile("busy", deadline=None)  # other processes share the cores
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.create(folder, seed=0)
    return folder


@pytest.fixture
def decoder(model_dir: Path) -> Decoder:
    return load_decoder(model_dir)


@pytest.fixture
def small(randomise: Callable[[Decoder], Decoder]) -> Decoder:
    """Two layers over a vocabulary of 50; weights large enough that distributions are far from
    flat.
    """
    config = ModelConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8
    )
    decoder = randomise(initialise(config, 3))
    with torch.no_grad():
        decoder.model.embed_tokens.weight.mul_(4)
    return decoder


@pytest.fixture
def randomise() -> Callable[[Decoder], Decoder]:
    """Makes every matrix random: a fresh model's blocks add nothing, and would hide a fault."""

    def change(decoder: Decoder) -> Decoder:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        return decoder

    return change


@pytest.fixture
def compute() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor
