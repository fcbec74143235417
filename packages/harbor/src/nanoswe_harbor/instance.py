"""Instance: one row of a SWE dataset, as published.

In: a mapping with the official column names; test lists may be lists or JSON-encoded strings.
Out: a frozen Instance. Refuses (pydantic.ValidationError) rows without an id, repository, commit,
patches, problem statement or test lists, and names that could leave the output folder.
"""

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class HarborError(Exception):
    """Base of every error that this package raises on purpose: one line, with the remedy."""


def _test_list(value: Any) -> Any:
    """Decode the official JSON-encoded lists; lists pass through."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError("is neither a list nor a JSON-encoded list") from error
    return value


def _text(value: Any) -> Any:
    return "" if value is None else value


TestList = Annotated[tuple[str, ...], BeforeValidator(_test_list)]
OptionalText = Annotated[str, BeforeValidator(_text)]


class Instance(BaseModel):
    """One dataset row. The two test lists hold ids as the test runner prints them."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="ignore")

    instance_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    repo: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
    base_commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    patch: str = Field(min_length=1)
    test_patch: str = Field(min_length=1)
    problem_statement: str = Field(min_length=1)
    fail_to_pass: TestList = Field(validation_alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: TestList = Field(validation_alias="PASS_TO_PASS")
    version: OptionalText = ""
    hints_text: OptionalText = ""
    created_at: OptionalText = ""
    environment_setup_commit: OptionalText = ""
    difficulty: OptionalText = ""
