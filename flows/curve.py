"""Curves people look at: drawn in the terminal, or as SVG for the report."""

import io
import itertools
from dataclasses import dataclass

import plotext

INK = "#123457"  # a colour that nothing else has: in the picture it becomes the page's own
LINES = (
    "#2f7de1",
    "#e07b24",
    "#2a9d5c",
    "#c2478b",
    "#8a6fd1",
    "#b59a1c",
    "#4aa5b5",
    "#d14545",
)  # on white and on black


@dataclass(frozen=True)
class Series:
    """A line: values over steps, with the interval of each where there is one."""

    name: str
    steps: list[int]
    values: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class FigureData:
    """A figure: its title and its lines, which are `named` even where there is only one."""

    title: str
    series: list[Series]
    named: bool = False


def terminal_curve(values: list[float], title: str, *, width: int = 72, height: int = 14) -> str:
    """`values` over steps 0, 1, ..., as text without colour codes."""
    if not values:
        return f"{title}: no step has finished"
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot(list(range(len(values))), values, marker="braille")
    plotext.title(title)
    plotext.xlabel("step")
    count = len(values)
    plotext.xticks(sorted({round(index * (count - 1) / 5) for index in range(6)}))
    drawn: str = plotext.build()
    return plotext.uncolorize(drawn)


def terminal_histogram(
    counts: list[float], edges: list[float], title: str, *, width: int = 72, height: int = 12
) -> str:
    """How many values are between each two `edges`, as text without colour codes."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.bar([(low + high) / 2 for low, high in itertools.pairwise(edges)], counts, width=1, marker="sd")
    plotext.title(title)
    ticks = [edges[round(place * (len(edges) - 1) / 5)] for place in range(6)]
    plotext.xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    heights = sorted({round(place * max(counts) / 4) for place in range(5)})
    plotext.yticks(heights, [f"{tick:,}" for tick in heights])
    drawn: str = plotext.build()
    return plotext.uncolorize(drawn)


def svg_figure(figure: FigureData) -> str:
    """A figure as an inline SVG element, in the page's own colour and font: it is read in light and in dark."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # a third of a second, which the start of a run need not wait for
    from matplotlib.rcsetup import cycler

    style = {"svg.fonttype": "none", "font.size": 11, "axes.prop_cycle": cycler(color=LINES)}
    style |= {name: INK for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")}
    with rc_context(style):
        drawn = Figure(figsize=(6.4, 3.0), layout="constrained")
        axes = drawn.add_subplot()
        for series in figure.series:
            (line,) = axes.plot(series.steps, series.values, marker="o", markersize=2.5, label=series.name)
            if series.low is not None and series.high is not None:
                axes.fill_between(series.steps, series.low, series.high, alpha=0.2, color=line.get_color())
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, color=INK)
        axes.patch.set_visible(False)
        axes.spines[["top", "right"]].set_visible(False)
        if figure.named or len(figure.series) > 1 or figure.series[0].low is not None:
            axes.legend(frameon=False, fontsize=9)
        sink = io.StringIO()
        drawn.savefig(sink, format="svg", transparent=True, metadata={"Date": None})
    text = sink.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
