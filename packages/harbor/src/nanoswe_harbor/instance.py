"""Instance: one row of a SWE dataset, as published.

In: a mapping with the official column names (`families.py` makes one of any known row). Out: a
frozen Instance. Refuses (ValidationError) rows without an id, repository, commit, patch, statement
or test lists, patches that do not parse, texts over 8 MiB, names that could leave a folder.
"""

import ast
import json
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from nanoswe_harbor.patches import clean

MAX_TEXT = 8 * 2**20  # evalkit takes no larger patch either
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class HarborError(Exception):
    """Base of every error that this package raises on purpose: one line, with the remedy."""


def _test_list(value: Any) -> Any:
    """Decode lists that are encoded as JSON, or as Python (SWE-bench Pro); others pass through."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("is neither a list nor an encoded list") from error


TestList = Annotated[tuple[str, ...], BeforeValidator(_test_list)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
OptionalText = Annotated[Text, BeforeValidator(lambda text: "" if text is None else text)]
OptionalPatch = Annotated[OptionalText, AfterValidator(lambda patch: patch and clean(patch))]


class Instance(BaseModel):
    """One dataset row. The two test lists hold ids as the test runner prints them."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="ignore")

    instance_id: str = Field(pattern=rf"^{NAME}$", max_length=200)
    repo: str = Field(pattern=rf"^{NAME}/{NAME}$", max_length=200)
    base_commit: str = Field(pattern=r"^[0-9a-f]{40}\^?$")  # R2E-Gym names the fix: its parent
    patch: Annotated[Text, Field(min_length=1), AfterValidator(clean)]
    test_patch: OptionalPatch
    problem_statement: Text = Field(min_length=1)
    fail_to_pass: TestList = Field(validation_alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: TestList = Field(validation_alias="PASS_TO_PASS")
    version: OptionalText = ""
    hints_text: OptionalText = ""
    created_at: OptionalText = ""
    environment_setup_commit: OptionalText = ""
    difficulty: OptionalText = ""
    # What some families know of their own environment, which others have in specs/.
    family: str = "swe-bench"
    image: OptionalText = Field(default="", pattern=r"^([a-z0-9][A-Za-z0-9._/:@-]*)?$")
    workdir: str = Field(default="/testbed", pattern=r"^/[A-Za-z0-9._/-]*$")
    test_cmd: OptionalText = ""
    log_parser: OptionalText = ""
    eval_type: OptionalText = ""
    eval_script: OptionalText = ""
    bug_patch: OptionalPatch = ""  # applied to the base commit before an agent starts (SWE-smith)
    source: str = ""
