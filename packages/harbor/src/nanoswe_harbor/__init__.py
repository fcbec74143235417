"""nanoswe_harbor: SWE dataset rows in, Harbor task folders out, and the grader that judges them.

In: rows (parquet, JSON lines, hub, or the generated `nano` source). Out: task folders, checkouts
without a future, verdicts. It imports nothing else of nano-swe and never touches a network unless
a hub name is asked for. Start at `instance.py`, then `convert.py`, `task.py`, `checkout.py`.
"""

__version__ = "0.1.0"
