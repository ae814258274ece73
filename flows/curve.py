"""Curves people look at: one drawn in the terminal, one as SVG for the report."""

import io

import plotext


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


def svg_curve(series: dict[str, list[float]], *, ylabel: str) -> str:
    """One line per named series over steps, as an inline SVG element."""
    from matplotlib.figure import Figure  # a third of a second, which the start of a run need not wait for

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name, values in series.items():
        axes.plot(range(len(values)), values, marker="o", markersize=3, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend()
    sink = io.StringIO()
    figure.savefig(sink, format="svg")
    text = sink.getvalue()
    return text[text.index("<svg") :]
