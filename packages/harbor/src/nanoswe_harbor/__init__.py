"""nanoswe_harbor: SWE dataset rows in, Harbor task folders out, and the grader that judges them.

In: rows. Out: task folders, checkouts without a future, verdicts. It touches no network but for a
hub name or a mirror's URL. Start at `instance.py`, then `convert.py`, `task.py`, `checkout.py`.
"""

__version__ = "0.1.0"
