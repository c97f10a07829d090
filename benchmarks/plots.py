"""Growth curves on logarithmic axes, with the slope that they are held against."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    label: str
    axis: str
    unit: str
    sizes: Sequence[float]
    values: Sequence[float]
    is_measured: bool = True
    """False: a reference."""

    def final_slope(self) -> float:
        """The exponent between the last two sizes."""
        (x0, x1), (y0, y1) = self.sizes[-2:], self.values[-2:]
        return log(y1 / y0) / log(x1 / x0)


def plot_growth(path: Path, curves: Sequence[Curve]) -> Path:
    """Write a PNG of one study."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        style = {"marker": "o"} if curve.is_measured else {"linestyle": "--", "color": "grey"}
        axes.plot(curve.sizes, curve.values, label=curve.label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(curves[0].sizes), [f"{size:,.0f}" for size in curves[0].sizes])
    axes.minorticks_off()
    axes.set_xlabel(curves[0].axis)
    axes.set_ylabel(curves[0].unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
