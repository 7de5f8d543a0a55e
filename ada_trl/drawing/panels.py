"""Panels and lines. matplotlib is imported only to draw."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def make_panels(rows: int, columns: int, **options: Any) -> tuple["Figure", np.ndarray]:
    """A figure and its panels, `(rows, columns)`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    return figure, panels


def draw(panel: "Axes", points: tuple[ArrayLike, ArrayLike], **style: Any) -> None:
    """Draw a line through x and y; a value whose neighbours are missing is a dot, as no line would show it."""
    x, y = (np.asarray(values, dtype=float) for values in points)
    known = np.pad(np.isfinite(y), 1)
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    dots: dict[str, Any] = (
        {"marker": "o", "markersize": 3, "markevery": np.flatnonzero(alone).tolist()} if alone.any() else {}
    )
    panel.plot(x, y, **dots | style)


def legend_above(panel: "Axes", **options: Any) -> None:
    """A legend in one line on top of the panel."""
    panel.legend(
        **{
            "fontsize": "small",
            "frameon": False,
            "ncols": 4,
            "handlelength": 1,
            "columnspacing": 1,
            "loc": "lower left",
            "bbox_to_anchor": (0, 1),
        }
        | options
    )
