"""Runs unittest, or a program that uses it, and records each result: `record.py FILE COMMAND…`.

In: a result file, then what would follow `python`: `-m module …` or `script.py …`. Out: lines
`STATUS id` in the file, for every test that ran, under its id and under its docstring's first line.
Changes nothing of what the program prints or returns. Standard library only; Python 3.5 and newer.
"""

import os
import runpy
import sys
import unittest

METHODS = "Success Failure Error Skip ExpectedFailure UnexpectedSuccess SubTest".split()
WORDS = "PASSED FAILED ERROR SKIPPED XFAIL FAILED FAILED".split()


def _watch(method, status, results):  # type: ignore[no-untyped-def]
    original = getattr(unittest.TestResult, method)

    def watched(self, test, *rest):  # type: ignore[no-untyped-def]
        if method != "addSubTest" or rest[-1] is not None:
            for name in (str(test), test.shortDescription() or ""):
                line = "{} {}\n".format(status, name.split("\n")[0])
                os.write(results, line.encode("utf-8", "replace") if name else b"")
        return original(self, test, *rest)

    setattr(unittest.TestResult, method, watched)


def main() -> None:
    """Watch, then be the program."""
    results = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for method, status in zip(METHODS, WORDS):  # noqa: B905
        _watch("add" + method, status, results)
    del sys.argv[:2]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = ""
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
