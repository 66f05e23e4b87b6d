"""Pictures as files that replace older ones whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.configs.files import atomic_file


@contextmanager
def picture(file: Path, *, columns: int = 1, size: tuple[float, float]) -> Iterator[Any]:
    """Yield matplotlib's axes, an array of them if there are several columns; write them as a PNG at the end.

    Args:
        size: width and height in inches, at 110 dots each.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    try:
        yield axes
        with atomic_file(file) as temporary:
            figure.savefig(temporary, dpi=110, format="png")
    finally:
        plt.close(figure)
