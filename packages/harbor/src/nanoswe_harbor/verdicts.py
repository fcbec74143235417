"""verdicts: recorded logs to verdicts, in the words of the official report.

In: rows of a dataset and logs, one file or records (.jsonl, .jsonl.gz, …) of `{instance_id,
test_output}`. Out: one dict a log: instance_id, resolved, outcome, reason, tests_status. A record
that cannot be judged gets the outcome grader_error and its reason; it never stops the others.
Refuses (SourceError) a file that cannot be read.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoswe_harbor.families import facts, parser_of
from nanoswe_harbor.grader.grade import START, grade
from nanoswe_harbor.instance import Instance
from nanoswe_harbor.sources import SourceError, read_rows, records
from nanoswe_harbor.task import load_task

NONE: dict[str, list[str]] = {"success": [], "failure": []}
NOT_JUDGED = {"resolved": False, "infra": True, "fail_to_pass": NONE, "pass_to_pass": NONE}


def read_log(path: Path) -> str:
    """A log as text; bytes that are not UTF-8 are replaced."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; give the log of a test run") from error


def judge_logs(rows: str, logs: Path) -> Iterator[dict[str, Any]]:
    """A verdict for every record of `logs`, by the expectations of `rows`."""
    instances = {row.instance_id: row for row in read_rows(rows)}
    return (_judge_record(instances, record, where) for where, record in records(logs))


def expectations(row: Instance, parser: str) -> dict[str, Any]:
    """What decides about a row, for `grade`; published ids that are cut are repaired here."""
    return {
        "schema": "expected/1",
        "parser": parser,
        "fail_to_pass": list(row.fail_to_pass),
        "pass_to_pass": list(row.pass_to_pass),
        "repaired": facts("truncated")["repaired"].get(row.instance_id, {}),
    }


def judge(row: Instance, log: str) -> dict[str, Any]:
    """The verdict on one log, whether run_eval.sh or an official harness wrote it."""
    expected = expectations(row, parser_of(row.repo))
    ours = f"\n{START} " in f"\n{log}"
    return _verdict(row.instance_id, grade(log, expected, official=not ours))


def judge_task(folder: Path, log: str, nonce: str | None) -> dict[str, Any]:
    """The verdict on the log of a task's own run_eval.sh."""
    task = load_task(folder)
    expected = json.loads((task.path / "tests/expected.json").read_text(encoding="utf-8"))
    return _verdict(task.task_id, grade(log, expected, nonce=nonce))


def _judge_record(instances: dict[str, Instance], record: Any, where: str) -> dict[str, Any]:
    name = ""
    try:
        if isinstance(record, Exception):
            raise record
        name = record["instance_id"]
        log = record["test_output"] if "test_output" in record else record["log"]
        if not isinstance(name, str) or not isinstance(log, str):
            raise TypeError("instance_id and test_output have to be strings")
        if isinstance(row := instances.get(name), Instance):
            return judge(row, log)
        reason = f"the rows have no {name}"
    except ValueError as error:
        reason = str(error)
    except (KeyError, TypeError) as error:
        reason = f"want an object with instance_id and test_output ({error})"
    return _verdict(name, {**NOT_JUDGED, "reason": f"{where}: {reason}"})


def _verdict(name: str, report: dict[str, Any]) -> dict[str, Any]:
    """A report in the words of the official one."""
    outcome = "resolved" if report["resolved"] else "unresolved"
    if report["infra"]:
        outcome = "grader_error"
    elif report["tamper"]:
        outcome = "tamper"
    elif report["reason"] == "the patch does not apply":
        outcome = "patch_rejected"
    lists = {key.upper(): report[key] for key in ("fail_to_pass", "pass_to_pass")}
    told = {"instance_id": name, "resolved": report["resolved"], "outcome": outcome}
    return {**told, "reason": report["reason"], "tests_status": lists}
