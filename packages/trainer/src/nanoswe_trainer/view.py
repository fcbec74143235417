"""The live view of a run: stage, progress, the curve so far, and one trial scrolling by. Facts go
to JSONL, not here.

In: calls from the loops. Out: a rich display on stderr where that is a terminal; elsewhere one
plain line now and then. Observed text is shown as text: markup in it means nothing, control
characters are dropped.
"""

import time
from collections.abc import Mapping
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nanoswe_evalkit.trial import Trial

SHOWN = ("reward_mean", "loss", "entropy", "grad_norm", "tokens_per_sec", "trials_per_sec",
         "age_max", "wait_sec")  # fmt: skip
BARS = "▁▂▃▄▅▆▇█"
LINES_OF_A_TRIAL = 14
PLAIN_EVERY_SEC = 5.0


def sparkline(values: list[float], width: int = 60) -> str:
    """Values from 0 to 1 as bars; where there are more than `width`, neighbours are averaged."""
    size = max(1, -(-len(values) // width))
    means = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
    return "".join(BARS[min(7, max(0, int(v * 8)))] for v in means)


def clean(text: str) -> str:
    return "".join(c for c in text if c == "\n" or c.isprintable())


class View:
    """`with View() as view:`; every method may be called at any rate."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        name = TextColumn("[bold]{task.description}")
        self._progress = Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._curve: list[float] = []
        self._numbers: dict[str, float] = {}
        self._trial: Trial | None = None
        self._task = self._progress.add_task("start", total=None)
        self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4)
        self._said, self._alarmed = 0.0, set[str]()

    def __enter__(self) -> "View":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        """One line that stays."""
        self.console.print(Text(text))

    def stage(self, name: str, total: int, done: int = 0) -> None:
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, completed=done)
        self._numbers = {}
        if not self.console.is_terminal:
            self.note(f"{name}: {total} to do" + (f", {done} done before" if done else ""))

    def advance(self, done: int | None = None) -> None:
        if done is None:
            self._progress.advance(self._task)
        else:
            self._progress.update(self._task, completed=done)

    def numbers(self, numbers: dict[str, float]) -> None:
        self._numbers = {k: v for k, v in numbers.items() if isinstance(v, (int, float))}
        if "reward_mean" in numbers:
            self._curve.append(numbers["reward_mean"])
        if not self.console.is_terminal and time.monotonic() - self._said > PLAIN_EVERY_SEC:
            self._said = time.monotonic()
            task = self._progress.tasks[0]
            facts = "  ".join(f"{k} {numbers[k]:.3g}" for k in SHOWN if k in numbers)
            self.note(f"{task.description}: {task.completed:.0f}/{task.total:.0f}  {facts}")

    def alarm(self, found: Mapping[str, str]) -> None:
        """Say what was not the matter at the step before."""
        for name in found.keys() - self._alarmed:
            self.note(f"LOOK: {found[name]}")
        self._alarmed = set(found)

    def trial(self, trial: Trial) -> None:
        self._trial = trial

    def _draw(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for key in SHOWN:
            if key in self._numbers:
                table.add_row(Text(key, style="dim"), f"{self._numbers[key]:.4g}")
        curve = Text(sparkline(self._curve), style="green")
        parts: list[RenderableType] = [self._progress, table]
        if self._curve:
            title = f"reward, {len(self._curve)} steps"
            parts.append(Panel(curve, title=title, title_align="left"))
        if self._trial:
            parts.append(self._trial_panel(self._trial))
        return Group(*parts)

    def _trial_panel(self, trial: Trial) -> Panel:
        text = Text()
        for message in trial.messages[1:]:
            calls = message.get("tool_calls") or []
            for call in calls:
                text.append("$ " + clean(str(call["function"]["arguments"])) + "\n", style="cyan")
            if not calls and message.get("content"):
                style = "" if message["role"] == "user" else "dim"
                text.append(clean(str(message["content"])).rstrip("\n") + "\n", style=style)
        lines = text.split("\n")[-LINES_OF_A_TRIAL:]
        colour = {1.0: "green", 0.0: "red", None: "yellow"}[trial.reward]
        title = f"{trial.trial_id}  {trial.outcome}"
        return Panel(Text("\n").join(lines), title=title, title_align="left", border_style=colour)
