"""nanoswe-evalkit: run one trial, run many, count, report."""

__version__ = "0.1.0"
