"""EnvSpec: how to install and test one (repo, version); Profile: what a whole benchmark shares.

In: a row, or a repository and a version. Out: both, from specs/*.yaml or from a row that brings
its image; the image's name. A row of Verified has its own pins; another one of its pair gets those
of most rows there. Refuses (SpecError) a pair that no spec file knows.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from nanoswe_harbor.families import facts
from nanoswe_harbor.instance import HarborError, Instance

INSTALLED = re.compile(r"apt-get (?:-y )?install ([^&;|]*)")  # by a line of a spec's pre_install


class SpecError(HarborError):
    """No environment is known for a row."""


class Profile(BaseModel):
    """What all rows of one benchmark share. Names have {owner} {rest} {env} {version} {digest}."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    published: str
    built: str = "nanoswe/env:{env}-{version}-{digest}"
    frame: str  # stands before the problem statement; has {workdir}
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
    package_files: tuple[str, ...] = ()  # where the repository keeps what `packages` names
    env_patches: tuple[str, ...] = ()
    pip_packages: tuple[str, ...] = ()
    lock: tuple[str, ...] = ()  # the exact pins, where known: they stand for all of the above
    build: tuple[str, ...] = ()  # pins of what pip asks for when it builds the project
    system: tuple[str, ...] = ()  # Debian packages
    pre_install: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    eval_commands: tuple[str, ...] = ()
    test_cmd: str
    parser: str
    directives: str  # what becomes of test files after test_cmd: paths modules django mypy none

    @property
    def contents(self) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
        """(Python, pins for pip, pins that no wheel stands for) where the pins are exact, or None.
        Conda's become wheels by name."""
        named = self.lock or (*self.packages.split(), *self.pip_packages)
        vague = self.package_files or (self.install and not named)
        if not self.lock and (vague or not all("=" in pin for pin in named)):
            return None
        python, table = self.python, facts("images")["conda"]
        pins, skipped = dict[str, str](), []
        for pin in named:
            name, version, *build = pin.replace("==", "=").split("=")
            of_python = "==" in pin or re.match(r"(py|.*_py)", build[0] if build else "py")
            if name == "python":
                python = version
            elif of_python and name not in table["no_wheel"]:
                name = table["names"].get(name, name)
                pins[re.sub(r"[-_.]+", "-", name).lower()] = f"{name}=={version}"
            elif name != "python_abi":
                skipped.append(f"{name}={version}")
        return ".".join(python.split(".")[:2]), tuple(pins.values()), tuple(skipped)

    @property
    def digest(self) -> str:
        """Hash of what an environment image holds: its base, and pins or what they come from."""
        origin = {"python", "packages", "package_files", "env_patches", "pip_packages"}
        if self.package_files:  # what they say depends on the repository
            origin |= {"repo", "version"}
        made = self.contents
        held = self.model_dump(include={"build", "system"} | (set() if made else origin))
        held |= {"base": facts("images")["base"], "contents": made}
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def find_spec(repo: str, version: str) -> tuple[Profile, EnvSpec]:
    """The profile and spec of a pair. Raises SpecError, naming the versions that are known."""
    known = _specs()
    versions = known.get(repo.lower()) or known.get(f"{repo.split('/')[0]}/*")
    if versions is None:
        raise SpecError(f"{repo}: no environment spec for this repository; add it to specs/")
    if version not in versions:
        raise SpecError(f"{repo}: no spec for version {version!r}; known: {', '.join(versions)}")
    return versions[version]


def spec_of(row: Instance) -> tuple[Profile, EnvSpec]:
    """The profile and spec of a row: by its pair, with its pins; by what it says itself if not."""
    try:
        if row.family != "swe-bench":
            raise SpecError(f"{row.instance_id}: a row of {row.family} without an image of its own")
        profile, spec = find_spec(row.repo, row.version)
    except SpecError:
        if not row.image:
            raise
        # Under another eval_type tests pass that the log does not show: no parser for that here.
        parsers = facts("families")["log_parsers"] if row.eval_type in ("", "pass_and_fail") else {}
        own = {"test_cmd": row.test_cmd, "parser": parsers.get(row.log_parser, "")}
        version = re.sub(r"[^\w.-]", "_", row.version, flags=re.ASCII)  # part of an image's name
        spec = EnvSpec(repo=row.repo, version=version, directives="none", **own)
        return Profile(**facts("families")["profile"]), spec
    users = facts("locks")["pairs"].get(row.repo, {}).get(row.version, {"": ()})
    lock = min(users, key=lambda digest: row.instance_id not in users[digest])
    return profile, _locked(spec, lock)


def known_specs(benchmark: str) -> Iterator[tuple[Profile, EnvSpec]]:
    """Every environment of `nano` or `swegym`, or every pinned one of `swebench`."""
    pairs = facts("locks")["pairs"]
    for repo, entry in facts(benchmark)["repos"].items():
        for version in (version for group in entry["specs"] for version in group["versions"]):
            profile, spec = find_spec(repo, version)
            locks = pairs.get(repo, {}).get(version, () if benchmark == "swebench" else [""])
            yield from ((profile, _locked(spec, digest)) for digest in locks)


def _locked(spec: EnvSpec, digest: str) -> EnvSpec:
    """A spec with the pins of a lock, and with the system packages of all specs that use it."""
    images, locks = facts("images"), facts("locks")
    versions = [v for v, users in locks["pairs"].get(spec.repo, {}).items() if digest in users]
    users = [find_spec(spec.repo, version)[1] for version in versions] or [spec]
    lines = "; ".join(line for user in users for line in user.pre_install)
    named = {w for w in " ".join(INSTALLED.findall(lines)).split() if not w.startswith("-")}
    found = {
        "lock": (*locks["locks"].get(digest, ()), *images["added"].get(digest, ())),
        "build": tuple(images["builds"].get(digest, ())),
        "system": tuple(sorted(named | set(images["system"].get(spec.repo, ())))),
    }
    return spec.model_copy(update=found)


def image_name(row: Instance, profile: Profile, spec: EnvSpec, images: str = "published") -> str:
    """The image of a row: the one published for it, or the one that we build."""
    if images == "published" and row.image:
        return row.image
    if images == "built":
        return built_name(profile, spec)
    owner, _, rest = row.instance_id.partition("__")
    names = {"owner": owner, "rest": rest, "version": spec.version, "digest": spec.digest[:12]}
    return profile.published.format(**names).lower()


def built_name(profile: Profile, spec: EnvSpec) -> str:
    """The image that we build for a spec."""
    env, digest = spec.repo.replace("/", "__"), spec.digest[:12]
    return profile.built.format(env=env, version=spec.version, digest=digest).lower()


@functools.cache
def _specs() -> dict[str, dict[str, tuple[Profile, EnvSpec]]]:
    """Repository (lower case) → version → (profile, spec)."""
    found: dict[str, dict[str, tuple[Profile, EnvSpec]]] = {}
    for document in map(facts, ("nano", "swebench", "swegym")):
        profile = Profile(**document["profile"])
        for repo, entry in document["repos"].items():
            common = {"repo": repo, "parser": entry["parser"], "directives": entry["directives"]}
            for group in entry["specs"]:
                own = {key: value for key, value in group.items() if key != "versions"}
                for version in group["versions"]:
                    spec = EnvSpec(version=version, **common, **own)
                    found.setdefault(repo.lower(), {})[version] = (profile, spec)
    return found
