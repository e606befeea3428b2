"""Figures as SVG that follow the page's colours and are the same bytes in every run."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

_INK = "#0b0c0d"  # stands for the page's text colour until the figure is an SVG

STYLE = {
    "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "patch.edgecolor": _INK, "grid.color": "0.5", "grid.alpha": 0.3,
    "legend.facecolor": "none", "legend.edgecolor": "0.5", "legend.framealpha": 0.0,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif",
    "svg.fonttype": "none", "figure.figsize": (7.0, 3.2),
}  # fmt: skip


def use_style() -> None:
    """Set matplotlib up for the site; no window opens."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)


def open_figures(salt: str) -> list[str]:
    """Return every open figure as an SVG element, and close them.

    Args:
        salt: makes the ids in a figure differ from those of the others on its page.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    svgs = []
    for number in plt.get_fignums():
        matplotlib.rcParams["svg.hashsalt"] = f"{salt}-{number}"
        figure = plt.figure(number)
        svgs.append(as_svg(figure, _title(figure)))
        plt.close(number)
    return svgs


def _title(figure: Any) -> str:
    """Return what a figure says of itself: its titles, or what its axes show."""
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    labels = [axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes]
    return ". ".join(titles or [label for label in labels if label]) or "figure"


def as_svg(figure: Any, name: str) -> str:
    """Return one figure as an SVG element, its text in the page's colour.

    Args:
        figure: of matplotlib.
        name: what it shows, for those who cannot see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")  # fmt: skip # noqa: E501
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#([\w.-]+)", svg))  # other ids would come again in the next figure
    svg = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", svg)
    # Its width is the column's, at most its own.
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
    svg = re.sub(r'<svg [^>]*?width="([\d.]+)pt" height="[\d.]+pt"', _fluid, svg, count=1)
    return re.sub(r"\n\s*\n", "\n", svg).strip()


def _fluid(found: re.Match[str]) -> str:
    element = found[0]
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element)
    return f'{element} style="width: 100%; max-width: {float(found[1]) * 4 / 3:.0f}px"'
