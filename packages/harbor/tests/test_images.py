"""images: which environments there are, what each is made of, and what bake is told."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nanoswe_harbor.convert import convert, render
from nanoswe_harbor.envspec import EnvSpec, built_name, known_specs, spec_of
from nanoswe_harbor.families import facts
from nanoswe_harbor.images import ImagesError, Target, plan
from nanoswe_harbor.promises import format_faults
from nanoswe_harbor.sources import read_rows
from nanoswe_harbor.task import load_tasks

ROOT = Path(__file__).resolve().parents[3]
EXCERPT = Path(__file__).parent / "data" / "verified_excerpt.jsonl"


def test_an_edited_dockerfile_gives_new_tags() -> None:
    digest = hashlib.sha256()
    paths = (path for name in ("base", "python", "env") for path in ROOT.glob(f"docker/{name}/*"))
    for path in sorted(paths):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    assert facts("images")["base"] == digest.hexdigest()[:12], "set `base` in specs/images.yaml"


@pytest.mark.parametrize(
    # 101 (repo, version, lock)s of Verified, 416 (repo, version)s of SWE-Gym
    ("source", "images", "pairs"),
    [("verified", 63, 101), ("swegym", 149, 416), ("nano", 1, 1)],
)
def test_equal_environments_are_one_image(source: str, images: int, pairs: int) -> None:
    targets = plan(source)
    tags = [tag for target in targets for tag in target.tags]
    names = [target.name for target in targets]
    assert len(targets) == images and len({*names}) == images and len({*tags}) == len(tags)
    assert sum(bool(re.search("-[0-9a-f]{12}$", tag)) for tag in tags) == pairs
    assert all(re.fullmatch(r"nanoswe/env:[a-z0-9_][a-z0-9._-]{0,127}", tag) for tag in tags)
    assert all(re.fullmatch(r"env-[a-z0-9_-]+", name) for name in names)
    assert plan(source) == targets


def test_every_row_finds_its_image_among_those_of_its_dataset(verified: tuple[Path, int]) -> None:
    tags = {tag: target for target in plan("verified") for tag in target.tags}
    for row in read_rows(str(verified[0])):
        target = tags[built_name(*spec_of(row))]
        assert not target.missing
        # pip's pins are kept as they are
        assert {p for p in spec_of(row)[1].lock if "==" in p} <= {*target.pins}


def test_an_alias_stands_for_the_image_of_most_rows(tmp_path: Path) -> None:
    alias, users = "nanoswe/env:django__django-5.0", facts("locks")["pairs"]["django/django"]["5.0"]
    assert {key: len(rows) for key, rows in users.items()} == {
        "44023de7a3f5": 21, "0d20261df4e0": 3
    }  # fmt: skip

    def lock_of(source: str) -> str:
        (tag,) = {t for found in plan(source) if alias in found.tags for t in found.tags
                  if t.startswith(f"{alias}-")}  # fmt: skip
        (lock,) = {
            spec.lock for _, spec in known_specs("swebench") if spec.digest[:12] == tag[-12:]
        }
        return next(key for key in users if tuple(facts("locks")["locks"][key]) == lock)

    assert lock_of("verified") == "44023de7a3f5"
    row = json.loads(EXCERPT.read_text().splitlines()[0]) | {"version": "5.0"}
    ids = [users["44023de7a3f5"][0], *users["0d20261df4e0"][:2]]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({**row, "instance_id": name}) for name in ids))
    assert lock_of(str(file)) == "0d20261df4e0"


def test_the_digest_is_that_of_what_the_image_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python, also beside pins that do not name it, and what stands for conda's packages."""
    pins = EnvSpec(repo="a/b", version="1", python="3.9", test_cmd="", parser="", directives="none",
                   lock=("x==1",))  # fmt: skip
    assert pins.digest != pins.model_copy(update={"python": "3.10"}).digest
    conda = pins.model_copy(update={"lock": ("python=3.9.20=h1_0", "iris=3.1=py39_0")})
    before, table = conda.digest, facts("images")["conda"]
    assert conda.contents == ("3.9", ("scitools-iris==3.1",), ())
    monkeypatch.setitem(table, "no_wheel", [*table["no_wheel"], "iris"])
    assert conda.contents == ("3.9", (), ("iris=3.1",)) and conda.digest != before


def test_a_row_that_brings_its_image_gets_into_no_build(tmp_path: Path) -> None:
    row = json.loads(EXCERPT.read_text().splitlines()[0])
    hostile = '1 $(touch /tmp/x)"; `id`\nRUN touch /tmp/x\n\t}{{ 7 * 7 }}'
    row |= {"repo": "some/body", "version": hostile, "image": "x/y:1", "test_cmd": "pytest"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(ImagesError, match="no environment"):
        plan(str(file))
    convert(read_rows(str(file)), tmp_path / "tasks", "rows", images="built")
    (task,) = load_tasks(tmp_path / "tasks")
    assert re.fullmatch(r"nanoswe/env:[\w.-]+", task.docker_image, re.ASCII)
    assert "touch" not in (task.path / "environment/Dockerfile").read_text().replace("_touch_", "")


def target(source: str, alias: str) -> Target:
    (found,) = plan(source, (alias,))
    return found


def test_what_a_lock_becomes() -> None:
    flask = target("verified", "pallets__flask-2.3")
    assert flask.python == "3.11" and {"pytest==7.3.0", "setuptools==75.1.0"} <= {*flask.pins}
    assert flask.build == ("setuptools==75.1.0", "wheel==0.40.0")
    old = target("verified", "django__django-1.11")
    assert old.python == "3.5" and old.system == ("locales",)
    xarray = target("verified", "pydata__xarray-2022.06")
    assert xarray.python == "3.10" and {"brotli==1.1.0", "boto3==1.35.23"} <= {*xarray.pins}
    assert {s.split("=")[0] for s in xarray.skipped} >= {"libnetcdf", "esmpy", "openssl"}
    # each pin is a wheel, or in the list of what is left out, or Python itself
    specs = {s.digest: s for _, s in known_specs("swebench")}.values()
    (lock,) = {s.lock for s in specs if (s.repo, s.version) == ("pydata/xarray", "2022.06")}
    names = {pin.split("=")[0]: pin.split("=")[1 + ("==" in pin)] for pin in lock}
    aliases = facts("images")["conda"]["names"]
    normal = {re.sub("[-_.]+", "-", pin).lower() for pin in xarray.pins}
    for name in names.keys() - {"python", "python_abi"}:
        wheel = re.sub("[-_.]+", "-", f"{aliases.get(name, name)}==").lower()
        skipped = f"{name}={names[name]}" in xarray.skipped
        wheels = any(pin.startswith(wheel) for pin in normal)
        assert wheels or skipped, name


def test_a_spec_without_exact_pins_says_so() -> None:
    dask = target("swegym", "dask__dask-2023.6")
    assert "tools/make_pins.py" in dask.missing and dask.pins == ()
    mypy = target("swegym", "python__mypy-0.820")
    assert not mypy.missing and "setuptools==56.0.0" in mypy.build


def test_a_source_of_rows(tmp_path: Path) -> None:
    rows = plan(str(EXCERPT))
    known = {tag for found in plan("verified") for tag in found.tags}
    assert rows and {tag for found in rows for tag in found.tags} <= known
    with pytest.raises(ImagesError, match="no environment"):
        plan("verified", ("nobody__*",))


def bake(**given: str | None) -> dict[str, Any]:
    return json.loads(render("bake.json.j2", {**given, "targets": plan("verified")}))


def test_what_bake_is_told() -> None:
    document = bake(pythons="/prefixes", ca="/ca.pem")
    names = document["group"]["envs"]["targets"]
    assert len(names) == 63 and {*names} <= {*document["target"]}
    one = document["target"][target("verified", "psf__requests-2.26").name]
    assert one["inherits"] == ["env"] and "nanoswe/env:psf__requests-2.26" in one["tags"]
    assert one["contexts"] == {"python": "target:python-3_9"} and one["secret"] == [
        "id=ca,src=/ca.pem"
    ]
    assert "urllib3==1.26.20" in one["args"]["PINS"].split()
    assert document["target"]["python-3_9"] == {"contexts": {"pythons": "/prefixes"}}
    assert "python-3_9" not in bake(pythons=None, ca=None)["target"]


def test_the_specs_files_are_as_they_are_written() -> None:
    """What make_pins.py adds can be read back, and no lock is without a user."""
    specs = ROOT / "packages/harbor/src/nanoswe_harbor/specs"
    locks = yaml.safe_load((specs / "locks.yaml").read_text())
    users = {key for versions in locks["pairs"].values() for v in versions.values() for key in v}
    assert users == set(locks["locks"]) >= set(facts("images")["builds"])


# Not planned yet: what they ask for contradicts the environment's own pins (astropy 4.3 and later,
# pylint 2.15 and 3.0), which docker/env/install holds both to.
NOT_MET = {"c2590b2aedc3", "3367b191c0dd", "15b402f80e67", "fcef61d0ca7a"}


def test_what_the_projects_are_built_with_is_planned() -> None:
    """`requires` of pyproject.toml at Verified's base commits, of all repositories but django,
    matplotlib and scikit-learn: a wheel of each in /opt/wheels."""
    wanted = json.loads((Path(__file__).parent / "data/build_requires.json").read_text())
    locks, targets, unmet = facts("locks")["locks"], plan("verified"), set()
    for key, requires in wanted.items():
        repo, version, lock = key.split()
        pins = (*locks[lock], *facts("images")["added"].get(lock, ()))
        images = {
            built_name(profile, spec)
            for profile, spec in known_specs("swebench")
            if (spec.repo, spec.version, spec.lock) == (repo, version, pins)
        }
        (found,) = (target for target in targets if images & {*target.tags})
        wheels = {canonicalize_name(pin.split("==")[0]): pin.split("==")[1] for pin in found.build}
        for text in requires:
            need = Requirement(text)
            if wheels.get(canonicalize_name(need.name), "") not in need.specifier:
                unmet.add(lock)
    assert len(wanted) > 25 and unmet == NOT_MET


def test_a_task_of_ours_builds_on_its_environment(tmp_path: Path) -> None:
    """Its Dockerfile starts from the image, takes the checkout, and installs as the spec says."""
    convert(read_rows(str(EXCERPT)), tmp_path / "tasks", "excerpt", images="built")
    tags = {tag for found in plan("verified") for tag in found.tags}
    for task in load_tasks(tmp_path / "tasks"):
        lines = (task.path / "environment/Dockerfile").read_text().splitlines()
        assert task.docker_image in tags and lines[0] == f"FROM {task.docker_image}"
        assert "COPY --from=checkout / /testbed" in lines
        (install,) = (json.loads(line[4:]) for line in lines if line.startswith('RUN ["/bin/bash"'))
        assert "activate testbed\npython -m pip install " in install[2]
    assert format_faults(tmp_path / "tasks") == (3, {})
