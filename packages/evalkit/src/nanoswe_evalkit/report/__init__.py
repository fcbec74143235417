"""The report of a run: a run folder in, one self-contained HTML file out."""

from nanoswe_evalkit.report.build import write_report

__all__ = ["write_report"]
