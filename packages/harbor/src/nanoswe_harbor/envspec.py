"""EnvSpec: how to install and test one (repo, version); Profile: what a whole benchmark shares.

In: a repository name and a version. Out: (Profile, EnvSpec) from specs/*.yaml, and from them the
image name and the test command of a row. Refuses (SpecError) a pair that no spec file knows.
"""

import functools
import hashlib
import json
import re
import shlex
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict

from nanoswe_harbor.instance import HarborError, Instance

# The extensions that the SWE-bench harness does not pass to a test runner.
NON_TEST_EXTS = tuple(".json .png csv .txt .md .jpg .jpeg .pkl .yml .yaml .toml".split())
PATCHED_FILE = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
OLD_FILE = re.compile(r"^(?:--- a/(.*)\n\+\+\+ |rename from (.*)$)", re.MULTILINE)


class SpecError(HarborError):
    """No environment is known for a row."""


class Profile(BaseModel):
    """What all rows of one benchmark share. `image` has {owner} {rest} {version} {digest}."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str
    frame: str  # stands before the problem statement
    activate: str  # shell line that puts the test environment on PATH
    agent_timeout_sec: float
    test_timeout_sec: int
    memory_mb: int
    cpus: int


class EnvSpec(BaseModel):
    """One (repo, version): how its environment is installed, and how its tests are run and read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str
    version: str
    python: str = ""
    packages: str = ""
    pre_install: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    pip_packages: tuple[str, ...] = ()
    eval_commands: tuple[str, ...] = ()
    test_cmd: str
    parser: str
    directives: str  # how test files become arguments of test_cmd: paths, modules, django or mypy

    @property
    def digest(self) -> str:
        """Hash of what gets installed; how it is tested is not part of an image."""
        tests = {"eval_commands", "test_cmd", "parser", "directives"}
        content = json.dumps(self.model_dump(exclude=tests), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def find_spec(repo: str, version: str) -> tuple[Profile, EnvSpec]:
    """The profile and spec of a row. Raises SpecError, naming the versions that are known."""
    known = _specs()
    owner = repo.split("/")[0]
    versions = known.get(repo.lower()) or known.get(f"{owner}/*")
    if versions is None:
        raise SpecError(f"{repo}: no environment spec for this repository; add it to specs/")
    if version not in versions:
        raise SpecError(f"{repo}: no spec for version {version!r}; known: {', '.join(versions)}")
    return versions[version]


def image_name(instance: Instance, profile: Profile, spec: EnvSpec) -> str:
    """The image of a row, lower case as registries want it."""
    owner, _, rest = instance.instance_id.partition("__")
    facts = {"version": spec.version, "digest": spec.digest[:12]}
    return profile.image.format(owner=owner, rest=rest, **facts).lower()


def patched_files(test_patch: str) -> tuple[str, ...]:
    """Every file that the test patch touches, by its new name."""
    return tuple(PATCHED_FILE.findall(test_patch))


def base_files(test_patch: str) -> tuple[str, ...]:
    """Those files that the base commit already has, by their old name."""
    return tuple(dict.fromkeys(a or b for a, b in OLD_FILE.findall(test_patch)))


def test_command(spec: EnvSpec, test_patch: str) -> str:
    """The shell command that runs the tests of a row."""
    files = [f for f in patched_files(test_patch) if not f.endswith(NON_TEST_EXTS)]
    match spec.directives:
        case "paths":
            arguments = [shlex.quote(f) for f in files]
        case "modules" | "django":
            prefix = "tests/" if spec.directives == "django" else ""
            names = [f.removesuffix(".py").removeprefix(prefix) for f in files]
            arguments = [name.replace("/", ".") for name in names]
        case "mypy":
            names = re.findall(r"^\+?.*\[case ([^\]]+)\]", test_patch, re.MULTILINE)
            arguments = [shlex.quote(" or ".join(names))]
        case other:
            raise SpecError(f"{spec.repo}: unknown directives {other!r} in its spec")
    return " ".join([spec.test_cmd.strip(), *arguments])


@functools.cache
def _specs() -> dict[str, dict[str, tuple[Profile, EnvSpec]]]:
    """Repository (lower case) → version → (profile, spec), over every file of specs/."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, dict[str, tuple[Profile, EnvSpec]]] = {}
    folder = resources.files("nanoswe_harbor") / "specs"
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        if not path.name.endswith(".yaml"):
            continue
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        profile = Profile(**document["profile"])
        for repo, entry in document["repos"].items():
            common = {"repo": repo, "parser": entry["parser"], "directives": entry["directives"]}
            for group in entry["specs"]:
                facts = {key: value for key, value in group.items() if key != "versions"}
                for version in group["versions"]:
                    spec = EnvSpec(version=version, **common, **facts)
                    found.setdefault(repo.lower(), {})[version] = (profile, spec)
    return found
