"""The trainer's recipe: evalkit's sections plus `sft`, `train` and `cluster`.

In: a YAML file and dotted overrides (see nanoswe_evalkit.recipe). Out: a frozen TrainRecipe.
Refuses what evalkit's schema refuses, sampling filters (the trainer needs the distribution that was
sampled), and settings of the algorithm that contradict each other.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from nanoswe_evalkit.recipe import ClusterSection, Recipe, Section
from nanoswe_harbor.task import Task, package_digest

PRESETS: dict[str, dict] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())
MACHINE = {"engine", "vllm", "vllm_options", "ranks", "backend", "train_threads", "max_tokens",
           "recompute"}  # fmt: skip


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
    """With data: leave out what earned less, or does not say; 1 is rejection sampling."""
    wrong: tuple[float, ...] = (0.6, 0.2)
    """Chance that a demonstration shows the tempting wrong repair; bug kinds take turns in it."""


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
    preset: Literal["", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "dppo", "deepswe",
                    "distill"] = ""  # fmt: skip
    """Gives the keys below the values of a published algorithm; keys in the recipe win."""
    advantage: Literal[
        "mean", "leave_one_out", "mean_std", "mean_std_unbiased", "maxrl", "teacher"
    ] = "mean"  # fmt: skip
    """Reward minus the group's mean; minus the mean of the others; over the group's deviation
    (population, unbiased); over its mean. teacher: what a token is likelier under the teacher.
    """
    teacher: Path | None = None
    """advantage teacher (on-policy distillation): its Hugging Face folder, with our vocabulary."""
    normaliser: Literal["token", "sequence", "constant", "prompt"] = "token"
    """What weighs the same: a token; a trial; a trial, by tokens over max_context; a group."""
    policy: Literal["clip", "reinforce", "gspo", "cispo", "dppo", "ice"] = "clip"
    """The loss of a token; see algo.py."""
    clip_low: float = Field(default=0.2, gt=0)
    """How far the ratio may fall below 1 (dppo: a token's probability); 1 or more: no bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """The same above 1."""
    drift: float = Field(default=0, ge=0)
    """Coefficient of the squared log-ratio to the policy that sampled."""
    kl: float = Field(default=0, ge=0)
    """Coefficient of the divergence from the policy that RL began with; 0 keeps no copy of it."""
    truncated: Literal["mask", "train", "penalise"] = "mask"
    """Trials that a limit cut off: left out; as if the agent had finished; of reward 0."""
    heldout: str = "heldout"
    """The folder beside the training tasks that evaluations use."""
    checkpoint_steps: int = Field(default=5, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        preset = PRESETS.get(str(given.get("preset"))) if isinstance(given, dict) else None
        return preset | given if preset else given

    @model_validator(mode="after")
    def _bound(self) -> Self:
        if 0 < self.max_age < self.depth:
            raise ValueError(f"max_age must be 0 or at least depth, {self.depth}")
        if (self.advantage == "teacher") != bool(self.teacher):
            raise ValueError("advantage: teacher needs train.teacher, and nothing else does")
        if self.teacher and self.kl:
            raise ValueError("with a teacher train.kl must be 0: one frozen model is kept")
        return self


class TrainCluster(ClusterSection):
    engine: Literal["local", "vllm"] = "local"
    """What samples: the trainer's own model in this process, or a vLLM server beside it."""
    vllm: str = ".vllm/bin/python"
    """vllm: the Python that has it, which `./just setup vllm` makes; or the URL of a server."""
    vllm_options: tuple[str, ...] = ("--enforce-eager",)
    """vllm: more of the server's own options."""
    max_context: int = Field(default=256, ge=64)
    """Tokens of a conversation, observations included."""
    ranks: int = Field(default=1, ge=1)
    """Over how many processes, or actors on Ray, the update is spread, one a GPU."""
    train_threads: int = Field(default=2, ge=1)
    """Of a rank, on a CPU; the embedded engine takes one."""
    max_tokens: int = Field(default=8192, ge=256)
    """Tokens of one micro-batch."""
    bf16: bool = False
    lora: int = Field(default=0, ge=0)
    """Learn only additions of this rank to the blocks' matrices; 0: learn everything."""
    recompute: bool = False
    """Compute each block again in the backward pass: slower by a third, far less memory."""


class TrainRecipe(Recipe):
    init: Path | None = None
    """The Hugging Face folder to start from; unset: the demo's tiny model, made from the seed."""
    sft: SftSection = SftSection()
    train: TrainSection = TrainSection()
    cluster: TrainCluster = TrainCluster()

    @property
    def has_trials(self) -> bool:
        """SFT on found transcripts alone runs none."""
        return bool(self.train.steps or not self.sft.data)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sft.min_reward and not self.sft.data:
            raise ValueError("sft.min_reward is for sft.data")
        if self.train.steps and self.model.temperature == 0:
            raise ValueError("RL needs model.temperature above 0: greedy trials are all the same")
        return self


def digest(recipe: TrainRecipe, tasks: Sequence[Task]) -> str:
    """What a checkpoint is bound to: every key but those of the machine, and what is learned from.
    A run may go on with other ranks, another engine, smaller micro-batches.
    """
    told = [json.dumps(recipe.model_dump(mode="json", exclude={"cluster": MACHINE}))]
    told += [package_digest(task.path) for task in tasks]
    told += [sha256(path.read_bytes()).hexdigest() for path in recipe.sft.data if path.is_file()]
    return sha256("\n".join(told).encode()).hexdigest()
