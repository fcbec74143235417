"""One YAML file is one run: a strict schema, dotted overrides, errors that name the nearest key.

In: a YAML path and `section.key=value` overrides. Out: a frozen Recipe; the trainer subclasses it.
Secrets are no part of it. Refuses (EvalkitError, one line) an unknown key, a wrong type, and a file
that is not a mapping. `1e-6`, which YAML reads as text, is a number.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from nanoswe_evalkit.agents.base import ModelConfig
from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.sandboxes.base import Limits

T = TypeVar("T")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def __hash__(self) -> int:  # pydantic's own fails on a mapping
        return hash(self.model_dump_json())


class TasksSection(Section):
    path: Path
    """A folder of Harbor tasks."""
    mirror: Path | None = None
    """Bare repositories `owner/name.git`; unset: the `mirror` beside the tasks, if any."""
    limit: int | None = Field(default=None, ge=1)
    """So many tasks, spread over the order of their ids: each repository has its share."""

    def chosen(self, tasks: Sequence[T]) -> list[T]:
        count = min(self.limit or len(tasks), len(tasks))
        return [tasks[i * len(tasks) // count] for i in range(count)]


class AgentSection(Section):
    kind: Literal["nano", "openhands", "mini", "command", "oracle", "nop"] = "nano"
    max_turns: int = Field(default=30, ge=1)
    """Model calls in all."""
    python: Path | None = None
    """openhands, mini: the Python that has it; unset: the one that `./just setup NAME` makes."""
    command: str = ""
    """command: what bash runs in the sandbox; it finds INSTRUCTION and OPENAI_BASE_URL."""
    nudges: int = Field(default=0, ge=0)
    """openhands: how often a reply without a tool call is answered `continue` before it ends."""
    stuck_detector: bool = True
    """openhands: stop when it repeats itself."""
    condenser_events: int = Field(default=0, ge=0)
    """openhands: summarise its history beyond so many events, by further model calls; 0: never."""


class SandboxSection(Section):
    kind: Literal["auto", "bwrap", "docker", "daytona", "allowlist"] = "auto"
    timeout_sec: float = Field(default=60, gt=0)
    """Of one command."""
    memory_mb: int = Field(default=1024, ge=64)
    processes: int = Field(default=64, ge=1)
    output_bytes: int = Field(default=65536, ge=1024)
    file_mb: int = Field(default=256, ge=1)
    images: str = ""
    """bwrap: store of `nanoswe-harbor image unpack`, whose roots stand for the tasks' images."""

    def limits(self) -> Limits:
        return Limits(**self.model_dump(exclude={"kind"}))


class ModelSection(Section):
    base_url: str = ""
    """OpenAI style, ending in /v1; the key, if any, comes from OPENAI_API_KEY."""
    proxy: str = ""
    """Instead: a nanoswe-proxy's root; each try has a session, whose calls are reconciled."""
    name: str = "default"
    temperature: float = Field(default=1.0, ge=0)
    max_tokens: int = Field(default=1024, ge=1)
    sampling: dict[str, Any] = {}
    """What else is sent with each call, as the service names it: {top_p: 0.8, top_k: 20}."""
    timeout_sec: float = Field(default=600, gt=0)
    """Of one model call."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if twice := self.sampling.keys() & {"temperature", "max_tokens", "seed", "n"}:
            raise ValueError(f"sampling.{min(twice)}: it has a key of its own, or one value")
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ValueError("base_url: want http://HOST:PORT/v1, or https")
        if self.sampling and not self.base_url:
            raise ValueError("sampling goes to model.base_url; what trains samples from all tokens")
        return self

    def config(self, seed: int, api_key: str = "") -> ModelConfig:
        fields = self.model_dump(exclude={"base_url", "proxy"})
        return ModelConfig(**fields, seed=seed, api_key=api_key)


class EvalSection(Section):
    attempts: int = Field(default=1, ge=1)
    k: tuple[PositiveInt, ...] = Field(default=(1,), min_length=1)
    concurrency: int = Field(default=4, ge=1, le=256)
    memory_mb: int = Field(default=0, ge=0)
    """Of all trials at once, by what their tasks ask for; 0: unbounded. With ray: see `cluster`."""
    share_verdicts: bool = False
    """Equal patches of one task are graded once; not for tests that may be flaky."""
    tracker: Literal["jsonl", "wandb"] = "jsonl"


class Recipe(Section):
    """The sections that evalkit owns."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = 0
    tasks: TasksSection
    agent: AgentSection = AgentSection()
    sandbox: SandboxSection = SandboxSection()
    model: ModelSection = ModelSection()
    eval: EvalSection = EvalSection()


class ClusterSection(Section):
    backend: Literal["local", "ray"] = "local"
    """ray: trials go to every node of a cluster, within the memory that each node has."""


class EvalRecipe(Recipe):
    cluster: ClusterSection = ClusterSection()


R = TypeVar("R", bound=Recipe)


def find_recipe(name: str, folder: str) -> Path:
    """The path of a .yaml file as it is, else of the recipe of that name below recipes/."""
    path = Path(name)
    return path if path.suffix in (".yaml", ".yml") else Path("recipes", folder, f"{name}.yaml")


def load_recipe(source: Path, overrides: Sequence[str], schema: type[R]) -> R:
    """Read a file, then as `make_recipe`."""
    try:
        data = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        others = (p.stem for p in source.parent.glob("*.yaml") if p.is_file() and p != source)
        names = ", ".join(sorted(others)) or "none"
        text = f"{source}: cannot be read; recipes in {source.parent}: {names}"
        raise EvalkitError(text) from error
    except (yaml.YAMLError, ValueError) as error:  # a date that is none
        raise EvalkitError(f"{source}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(data, dict):
        raise EvalkitError(f"{source}: not a mapping of sections; see recipes/ for examples")
    return make_recipe(data, overrides, schema, str(source))


def make_recipe(data: dict[str, Any], overrides: Sequence[str], schema: type[R], source: str) -> R:
    """Override, check; errors begin with `source`."""
    for override in overrides:
        _override(data, override)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise EvalkitError(f"{source}: {_first_error(error, schema)}") from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe, as YAML that `load_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not all([*sections, last]):
        raise EvalkitError(f"override {override!r}: want section.key=value")
    for section in sections:
        # A section that is absent or empty starts out empty.
        data[section] = data.get(section) or {}
        data = data[section]
        if not isinstance(data, dict):
            raise EvalkitError(f"override {override!r}: {section} is a value, not a section")
    try:
        data[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise EvalkitError(f"override {override!r}: the value is not YAML") from error


def _first_error(error: ValidationError, schema: type[BaseModel]) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{path}: {first['msg']} (it is {first.get('input')!r})"
    fields = schema.model_fields
    for part in first["loc"][:-1]:
        section: Any = fields[str(part)].annotation
        fields = section.model_fields
    near = difflib.get_close_matches(str(first["loc"][-1]), fields, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
    return f"unknown key {path}; {hint}"
