"""Families: the rows of each SWE dataset, brought to the official columns.

In: one row. Out: a mapping for Instance, by the field maps of specs/families.yaml. Refuses
(BAD_ROW, one line) a row of no known family, naming the nearest, null columns, and values of the
wrong kind.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import jinja2
import jinja2.meta
import yaml

from nanoswe_harbor.patches import reverse

TEST_PATH = re.compile(r"(^|/)[Tt]ests?/|(^|/)test_[^/]*$|_test\.py$")
BAD_ROW = (LookupError, TypeError, ValueError, RecursionError)
# Name, needed columns, and a function of the row for each column of an Instance.
Family = tuple[str, list[str], dict[str, Callable[..., Any]]]


@functools.cache
def facts(name: str) -> dict[str, Any]:
    """specs/<name>.yaml."""
    path = resources.files("nanoswe_harbor") / "specs" / f"{name}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return loaded


def parser_of(repo: str) -> str:
    """The name of the parser for a repository's logs."""
    repo, parsers = repo.lower(), facts("families")["parsers"]
    found: str = parsers.get(repo) or parsers.get(f"{repo.partition('/')[0]}/*", "pytest")
    return found


def adapt(row: Any) -> dict[str, Any]:
    """The official columns of a row. Raises one of BAD_ROW."""
    if isinstance(row, Mapping) and isinstance(inner := row.get("verifier_metadata"), Mapping):
        row = inner.get("instance_dict", row)  # NeMo Gym's wrapping
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is a mapping, not a {type(row).__name__}")
    name, _, columns = _nearest(row)
    found = {key: row[key] for key in facts("families")["optional"] if row.get(key) is not None}
    for column, value in columns.items():
        try:
            found[column] = value({**row, "row": row})
        except Exception as error:  # our expressions on foreign values: they may fail in any way
            raise ValueError(f"column {column}: {error or type(error).__name__}") from error
    return {**found, "family": name}


def _nearest(row: Mapping[str, Any]) -> Family:
    """The family of which a row lacks least and has most. Raises ValueError."""

    def lacks(family: Family) -> list[str]:
        return [need for need in family[1] if need not in row]

    family = min(_families(), key=lambda f: (len(lacks(f)), len(lacks(f)) - len(f[1])))
    name, needs, _ = family
    if name == "swe-smith" and not str(row.get("repo")).startswith("swesmith/"):
        raise ValueError("no test_patch, which swe-bench, the nearest, has")
    if missing := lacks(family):
        raise ValueError(f"no {', '.join(missing)}, which {name}, the nearest, has")
    if nulls := [need for need in needs if row[need] is None]:
        tests = [need for need in nulls if "pass" in need.lower()]
        raise ValueError(f"{'no test lists: ' * bool(tests)}null in {' and '.join(tests or nulls)}")
    return family


@functools.cache
def _families() -> list[Family]:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(from_json=json.loads, zip=zip, passed=_passed)
    environment.filters.update(prose=_prose, reverse_patch=reverse)
    environment.tests["test_path"] = TEST_PATH.search
    result: list[Family] = []
    for name, entry in facts("families")["families"].items():
        columns: dict[str, Callable[..., Any]] = {}
        needs: set[str] = set()
        for column, text in {**dict.fromkeys(entry["same"]), **entry.get("columns", {})}.items():
            source = text or column
            if "{%" in source:
                columns[column] = environment.from_string(source).render
            else:
                columns[column] = environment.compile_expression(source, undefined_to_none=False)
                source = f"{{{{ {source} }}}}"
            needs |= jinja2.meta.find_undeclared_variables(environment.parse(source)) - {"row"}
        result.append((name, sorted(needs), columns))
    return result


def _passed(log: str | None) -> list[str]:
    """R2E-Gym's names of the tests that passed in a pytest log: what follows the file, dotted."""
    lines = (log or "").splitlines()
    return [".".join(line.split("::")[1:]) for line in lines if line.startswith("PASSED ")]


def _prose(texts: list[str | None]) -> str:
    """Texts in one; some of SWE-bench Pro's are JSON-quoted."""
    quoted = [text for text in texts if text]
    return "\n\n".join(str(json.loads(t)) if re.fullmatch(r'"(.*)"', t) else t for t in quoted)
