"""Fixtures: a random tiny decoder with a real tokenizer, and one compute thread."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nanoswe_trainer import tiny
from nanoswe_trainer.model import Decoder, ModelConfig, initialise, load_decoder


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
def small() -> Decoder:
    """Two layers over a vocabulary of 50; weights large enough that distributions are far from
    flat.
    """
    config = ModelConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8
    )
    decoder = initialise(config, 3)
    with torch.no_grad():
        decoder.model.embed_tokens.weight.mul_(8)
    return decoder


@pytest.fixture
def compute() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor
