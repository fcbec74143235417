"""families: a real row of each dataset becomes a whole folder, and a bad row is named."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoswe_harbor.convert import convert, task_files
from nanoswe_harbor.envspec import _specs, image_name, spec_of
from nanoswe_harbor.families import adapt, facts
from nanoswe_harbor.instance import Instance
from nanoswe_harbor.patches import changes, clean, reverse
from nanoswe_harbor.promises import format_faults
from nanoswe_harbor.sources import Rejected, scan, select

HERE = Path(__file__).resolve().parent
ROWS = [json.loads(line) for line in (HERE / "data/families.jsonl").read_text().splitlines()]
VERIFIED = [json.loads(s) for s in (HERE / "data/verified_excerpt.jsonl").read_text().splitlines()]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATCH = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"


def test_each_family_is_known_by_its_columns_and_brings_its_image(tmp_path: Path) -> None:
    found = [Instance.model_validate(adapt(row)) for row in ROWS]
    assert [row.family for row in found] == [
        "swe-rebench-v2",
        "swe-bench-pro",
        "multi-swe-bench",
        "swe-smith",
        "swe-bench",
        "swe-bench",
    ]
    names = [image_name(row, *spec_of(row)) for row in found]
    assert names[0].startswith("docker.io/swerebenchv2/")
    assert names[1].startswith("jefzda/sweap-images@sha256:")
    assert names[2].startswith("mswebench/google_m_gson:pr-")
    assert names[3] == "jyangballin/swesmith.x86_64.pandas-dev_1776_pandas.95280573"
    assert names[4] == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert found[3].patch == reverse(found[3].bug_patch) != found[3].bug_patch
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert convert(scan(str(source)), tmp_path / "a", "rows") == (6, 0, [])
    assert format_faults(tmp_path / "a") == (6, {})
    # Converted again from its own folders, every task has the same bytes.
    assert convert(scan(str(tmp_path / "a")), tmp_path / "a", "rows") == (6, 6, [])


def test_r2e_gym_by_its_schema() -> None:
    line = {"type": "added", "content": "b"}
    hunk = {
        "descriptor": {
            "old_range": {"start": 1, "length": 1},
            "new_range": {"start": 1, "length": 2},
        },
        "line_group": {"all_lines": [{"type": "context", "content": "a"}, line]},
    }
    files = [
        {
            "header": {"file": {"path": path}, "misc_line": None},
            "minus_file": {"path": f"a/{path}"},
            "plus_file": {"path": f"b/{path}"},
            "hunks": [hunk],
        }
        for path in ("pandas/x.py", "pandas/tests/test_x.py")
    ]
    log = "PASSED r2e_tests/test_1.py::T::test_old\nFAILED r2e_tests/test_1.py::T::test_new\n"
    row = {
        "repo_name": "pandas",
        "docker_image": f"namanjain12/pandas_final:{COMMIT}",
        "commit_hash": COMMIT,
        "parsed_commit_content": json.dumps({"file_diffs": files}),
        "execution_result_content": json.dumps({"old_commit_res_stdout": log}),
        "expected_output_json": json.dumps({"T.test_old": "PASSED", "T.test_new": "PASSED"}),
        "problem_statement": "[ISSUE]\nIt is wrong.\n[/ISSUE]",
    }
    found = Instance.model_validate(adapt(row))
    assert (found.family, found.repo) == ("r2e-gym", "pandas-dev/pandas")
    assert (found.fail_to_pass, found.pass_to_pass) == (("T.test_new",), ("T.test_old",))
    assert found.problem_statement == "It is wrong."
    assert changes(found.patch) == [("pandas/x.py", "pandas/x.py")]
    assert "@@ -1,1 +1,2 @@\n a\n+b\n" in found.patch


def rejected(tmp_path: Path, **columns: object) -> str:
    row = {key: value for key, value in (VERIFIED[0] | columns).items() if value is not ...}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (row, VERIFIED[1])))
    bad, good = scan(str(path))
    assert isinstance(good, Instance) and isinstance(bad, Rejected) and "\n" not in bad.reason
    return bad.reason


@pytest.mark.parametrize("column", facts("families")["families"]["swe-bench"]["same"])
def test_a_column_missing_null_or_of_the_wrong_type(tmp_path: Path, column: str) -> None:
    assert f"no {column}, which swe-bench" in rejected(tmp_path, **{column: ...})
    assert column in rejected(tmp_path, **{column: None})
    assert f"column {column}" in rejected(tmp_path, **{column: {"a": 1}})


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("not a diff", "not a git diff"),
        (PATCH[:-3], "cut short"),
        (PATCH.replace("@@ -1 +1 @@", "@@ nonsense @@"), "does not parse"),
        (PATCH.replace("x.py", "../x.py"), "leaves the repository"),
        (PATCH.replace("x.py", ".git/hooks/x"), "leaves the repository"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary file without its data"),
        (PATCH + "#" * 50_000_000, "at most 8388608"),
    ],
)
def test_a_bad_patch(tmp_path: Path, patch: str, reason: str) -> None:
    assert reason in rejected(tmp_path, patch=patch)


def test_crlf_and_a_missing_last_newline_are_mended() -> None:
    assert clean(PATCH.replace("\n", "\r\n")) == PATCH
    assert clean(PATCH[:-1]) == PATCH
    crlf_file = PATCH.replace("-a\n+b\n", "-a\r\n+b\r\n")
    assert clean(crlf_file) == crlf_file


def test_specs_are_complete() -> None:
    locks = facts("locks")
    pairs = [(repo, version) for repo, users in locks["pairs"].items() for version in users]
    made_here = [pair for pair in pairs if pair[0] in facts("swegym")["repos"]]
    assert (len(locks["locks"]), len(pairs)) == (63 + 3, 80 + 3) and len(made_here) == 3
    assert all(version in _specs()[repo] for repo, version in pairs)
    gym = [v for vs in _specs().values() for v in vs.values() if "xingyaoww" in v[0].published]
    assert len(gym) == 416


GYM_IDS = HERE.parents[3] / "shared/data/swe_gym/instance_ids.json"
GYM = list(json.loads(GYM_IDS.read_text())) if GYM_IDS.is_file() else []
NAMES = {
    "Project-MONAI__MONAI-1121": "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1121",
    "python__mypy-10174": "xingyaoww/sweb.eval.x86_64.python_s_mypy-10174",
    "django__django-10097": "swebench/sweb.eval.x86_64.django_1776_django-10097:latest",
    "scikit-learn__scikit-learn-10297": (
        "swebench/sweb.eval.x86_64.scikit-learn_1776_scikit-learn-10297:latest"
    ),
}


@pytest.mark.parametrize("name", [*NAMES, *GYM])
def test_an_id_has_one_image_of_each_kind(name: str) -> None:
    """SWE-bench's and SWE-Gym's rules for `__`, exact, lower case whatever the id is."""
    owner, rest = name.split("__")
    repo = f"{owner}/{rest.rsplit('-', 1)[0]}"
    version = next(iter(_specs()[repo.lower()]))
    row = Instance.model_validate(
        adapt(VERIFIED[0] | {"instance_id": name, "repo": repo, "version": version})
    )
    profile, spec = spec_of(row)
    gym = f"xingyaoww/sweb.eval.x86_64.{owner}_s_{rest}".lower()
    assert image_name(row, profile, spec) == NAMES.get(name, gym)
    built = image_name(row, profile, spec, "built")
    assert built == f"nanoswe/env:{owner}__{rest.rsplit('-', 1)[0]}-".lower() + (
        f"{version}-{spec.digest[:12]}"
    )


def test_a_sample_is_the_same_in_any_order() -> None:
    rows = [
        Instance.model_validate(
            adapt(VERIFIED[0] | {"instance_id": f"a__b-{i}", "repo": f"a/{i % 3}"})
        )
        for i in range(30)
    ]
    one = {row.instance_id for row in select(rows, sample=6, stratify="repo", seed=1)}
    two = {row.instance_id for row in select(rows[::-1], sample=6, stratify="repo", seed=1)}
    assert one == two and len(one) == 6
    chosen = [row.repo for row in rows if row.instance_id in one]
    assert sorted(chosen) == ["a/0", "a/0", "a/1", "a/1", "a/2", "a/2"]


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip))
def test_any_statement_gives_the_same_bytes_twice(statement: str) -> None:
    row = Instance.model_validate(adapt(VERIFIED[0] | {"problem_statement": statement}))
    assert task_files(row, "x") == task_files(row, "x")
