"""What a person sees: progress with rate and ETA, tables, and the closing line of every verb."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from draftsmith.configs.errors import DraftsmithError

WIDTH = None if sys.stdout.isatty() else 120
"""Columns of a table in a file or a pipe, where no terminal says how wide it is."""

console = Console(stderr=True, soft_wrap=True, width=None if sys.stderr.isatty() else 120)
"""Progress, warnings and errors; standard output is kept for results that other programs read."""

out = Console(soft_wrap=True, width=WIDTH)
"""Results."""


class _RateColumn(ProgressColumn):
    """Units a second, over the task's own unit name."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {task.fields['unit']}/s" if speed else "", style="cyan")


class Meter:
    """Progress of one long task; prints a plain line every ten per cent where the output is no terminal."""

    def __init__(self, progress: Progress, task: TaskID, total: float, done: float, *, quiet: bool) -> None:
        self._progress, self._task, self._total, self._quiet = progress, task, total, quiet
        self._first, self._began = done, time.monotonic()
        self._completed = done
        self._printed = int(10 * done / total) if total else 10

    def advance(self, units: float, note: str = "") -> None:
        """Count `units` more of the task's unit and show `note` beside the bar."""
        self._completed += units
        self._progress.update(self._task, advance=units, note=note)
        if self._quiet or console.is_terminal:
            return
        tenth = int(10 * self._completed / self._total) if self._total else 10
        if tenth > self._printed:
            self._printed = tenth
            task = self._progress.tasks[0]
            speed = (self._completed - self._first) / max(1e-6, time.monotonic() - self._began)
            left = (self._total - self._completed) / speed if speed else 0.0
            console.print(
                f"  {task.description}: {self._completed:,.0f} of {self._total:,.0f} {task.fields['unit']}, "
                f"{speed:,.1f}/s, about {left:,.0f} s left {note}",
                highlight=False,
            )


@contextmanager
def meter(description: str, total: float, unit: str, done: float = 0, *, quiet: bool = False) -> Iterator[Meter]:
    """Show a bar for `total` units of `unit`, of which `done` were finished by an earlier run; nothing if `quiet`."""
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        console=console, disable=quiet or not console.is_terminal,
    )  # fmt: skip
    with progress:
        task = progress.add_task(description, total=total, completed=int(done), unit=unit, note="")
        yield Meter(progress, task, total, done, quiet=quiet)


def warn(message: str) -> None:
    """A yellow line that does not stop the work."""
    console.print("[yellow]warning[/yellow]", end=" ")
    console.print(message, markup=False, highlight=False)


def report_error(error: Exception) -> None:
    """A fault of the inputs, in red and to the letter."""
    console.print("[red]error[/red]", end=" ")
    console.print(str(error), markup=False, highlight=False)


def run_script(main: Callable[[], None], usage: str | None, needed: int) -> None:
    """Run a script's `main`: its usage where fewer than `needed` arguments are given, a fault of the inputs in words."""
    if len(sys.argv) <= needed:
        sys.exit(usage)
    try:
        main()
    except DraftsmithError as error:
        sys.exit(f"error: {error}")


def closing(wrote: str, following: str | None = None) -> None:
    """The last lines of a verb: what was written, and the command that comes next."""
    for word, text in (("wrote", wrote), ("next ", following)):
        if text:
            console.print(f"[green]{word}[/green]", end=" ")
            console.print(text, markup=False, highlight=False)


def table(title: str, columns: list[str], rows: list[list[str]], *, left: bool = False) -> Table:
    """A small table; the first column is text, the others are right-aligned numbers unless `left`."""
    view = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        view.add_column(column, justify="left" if left or index == 0 else "right")
    for row in rows:
        view.add_row(*row)
    return view
