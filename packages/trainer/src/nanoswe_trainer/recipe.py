"""The trainer's recipe: evalkit's sections plus `sft`, `train` and `cluster`.

In: a YAML file and dotted overrides (see nanoswe_evalkit.recipe). Out: a frozen TrainRecipe.
Refuses what evalkit's schema refuses, sampling filters (the trainer needs the distribution that was
sampled), and settings of the algorithm that contradict each other.
"""

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationInfo, field_validator, model_validator

from nanoswe_evalkit.recipe import Recipe, Section, dump_recipe

PRESETS: dict[str, dict] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())


class Truncated(StrEnum):
    """What becomes of a trial that a limit cut off."""

    MASK = "mask"  # neither in the baseline nor trained
    TRAIN = "train"  # as if the agent had finished
    PENALISE = "penalise"  # trained with reward 0, whatever the verdict


class SftSection(Section):
    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 leaves SFT out."""
    batch: int = Field(default=32, ge=1)
    """Demonstrations a step."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Of AdamW, for embeddings and norms."""
    muon_learning_rate: float = Field(default=0.02, ge=0)
    """Of Muon, for the matrices of the blocks; 0 gives them to AdamW as well."""
    warmup_steps: int = Field(default=20, ge=0)
    decay: float = Field(default=0.4, ge=0, le=1)
    """The last share of the steps, over which the rate falls linearly to a twentieth."""
    context_weight: float = Field(default=0.1, ge=0)
    """Loss weight of a token that the agent only reads; those it writes weigh 1."""
    data: tuple[Path, ...] = ()
    """Files of transcripts (see transcripts.py) to learn from; none: the nano demonstrations."""
    min_reward: float = Field(default=0, ge=0, le=1)
    """With data: leave out what earned less, or does not say what it earned; 1 is rejection
    sampling.
    """
    wrong: tuple[float, ...] = (0.6, 0.2)
    """Chance that a demonstration shows the tempting wrong repair; the bug kinds take turns through
    the list.
    """


class TrainSection(Section):
    steps: int = Field(default=0, ge=0)
    """Optimizer steps, one a batch of groups; 0 leaves RL out."""
    groups: int = Field(default=8, ge=1)
    """Tasks a step."""
    group_size: int = Field(default=8, ge=2)
    """Attempts at each."""
    depth: int = Field(default=0, ge=0)
    """How many steps' worth of groups may be sampled ahead of training; 0 is synchronous."""
    max_age: int = Field(default=0, ge=0)
    """No group trains later than so many versions after its start; 0: twice the depth."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Of AdamW, for everything."""
    warmup_steps: int = Field(default=4, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    preset: Literal["", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "dppo", "deepswe"] = ""
    """Gives the keys below the values of a published algorithm; keys in the recipe win."""
    advantage: Literal["mean", "leave_one_out", "mean_std", "mean_std_unbiased", "maxrl"] = "mean"
    """Reward minus the group's mean; minus the mean of the others; over the group's deviation
    (population, unbiased); over its mean.
    """
    normaliser: Literal["token", "sequence", "constant", "prompt"] = "token"
    """What weighs the same: each token; each trial; each trial, by tokens over max_context; each
    group.
    """
    policy: Literal["clip", "reinforce", "gspo", "cispo", "dppo", "ice"] = "clip"
    """The loss of a token; see algo.py."""
    clip_low: float = Field(default=0.2, gt=0)
    """How far the ratio may fall below 1 (dppo: a token's probability); 1 or more: no bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """The same above 1."""
    dual_clip: float = Field(default=0, ge=0)
    """clip: bounds the loss of a bad token at so many times its advantage; 0: no bound."""
    drift: float = Field(default=0, ge=0)
    """Coefficient of the squared log-ratio to the policy that sampled."""
    kl: float = Field(default=0, ge=0)
    """Coefficient of the divergence from the policy that RL began with; 0 keeps no copy of it."""
    kl_kind: Literal["k2", "k3"] = "k3"
    truncated: Truncated = Truncated.MASK
    """What becomes of a trial that a limit cut off: mask, train or penalise."""
    min_group: int = Field(default=0, ge=0)
    """A group with fewer trusted rewards is dropped; 0: half of it, at least two."""
    heldout: str = "heldout"
    """The folder beside the training tasks that evaluations use."""
    checkpoint_steps: int = Field(default=5, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        preset = PRESETS.get(str(given.get("preset"))) if isinstance(given, dict) else None
        return preset | given if preset else given

    @field_validator("dual_clip")
    @classmethod
    def _dual_clip(cls, value: float, info: ValidationInfo) -> float:
        if value and (value <= 1 or info.data.get("policy") != "clip"):
            raise ValueError("is for policy clip, and above 1")
        return value

    @field_validator("min_group")
    @classmethod
    def _min_group(cls, value: int, info: ValidationInfo) -> int:
        if value == 1 or value > info.data.get("group_size", value):
            raise ValueError("must be 0, or from 2 to group_size")
        return value

    @model_validator(mode="after")
    def _bound(self) -> Self:
        if 0 < self.max_age < self.depth:
            raise ValueError(f"max_age must be 0 or at least depth, {self.depth}")
        return self


class ClusterSection(Section):
    engine: Literal["local", "vllm"] = "local"
    """What samples: the trainer's own model in this process, or a vLLM server beside it."""
    vllm: Path = Path(".vllm/bin/python")
    """vllm: the Python that has it; `./just setup vllm` makes it."""
    vllm_options: tuple[str, ...] = ("--enforce-eager",)
    """vllm: more of the server's own options."""
    max_context: int = Field(default=256, ge=64)
    """Tokens of a conversation, observations included."""
    slots: int = Field(default=64, ge=1)
    """Sequences that the embedded engine decodes at once; also the bound on concurrent trials."""
    engine_threads: int = Field(default=1, ge=1)
    train_threads: int = Field(default=2, ge=1)
    max_tokens: int = Field(default=8192, ge=256)
    """Tokens of one micro-batch."""
    bf16: bool = False


class TrainRecipe(Recipe):
    init: Path | None = None
    """The Hugging Face folder to start from; unset: the demo's tiny model, made from the seed."""
    sft: SftSection = SftSection()
    train: TrainSection = TrainSection()
    cluster: ClusterSection = ClusterSection()

    @field_validator("sft")
    @classmethod
    def _found(cls, sft: SftSection) -> SftSection:
        if sft.min_reward and not sft.data:
            raise ValueError("min_reward is for sft.data")
        return sft

    @field_validator("train")
    @classmethod
    def _samples(cls, train: TrainSection, info: ValidationInfo) -> TrainSection:
        model = info.data.get("model")  # absent when it has an error of its own
        if train.steps and model and model.temperature == 0:
            raise ValueError("RL needs model.temperature above 0: greedy trials are all the same")
        return train


def digest(recipe: TrainRecipe) -> str:
    """What a checkpoint is bound to: every key."""
    return hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()
