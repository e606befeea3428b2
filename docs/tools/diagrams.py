"""The diagrams of the site, drawn when it is built: each function returns a figure.

A page asks for one with a line ``<!-- diagram: name -->``. Run as a script, this file writes the
README's figure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from figures import as_svg, use_style
from matplotlib.axes import Axes

GREEN, BLUE, ORANGE, GREY = "tab:green", "tab:blue", "tab:orange", "0.5"


def _canvas(width: float, height: float) -> tuple[Any, Axes]:
    """Return a figure whose units are tenths of an inch, with y downwards."""
    figure, axes = plt.subplots(figsize=(width / 10, height / 10))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def _box(
    axes: Axes, x: float, y: float, w: float, h: float, text: str, colour: str = GREY, **style: Any
) -> None:
    """Draw a box with a text in it."""
    edge = {"edgecolor": colour, "linewidth": 1.4, **style}
    axes.add_patch(plt.Rectangle((x, y), w, h, facecolor=colour, alpha=0.16))
    axes.add_patch(plt.Rectangle((x, y), w, h, fill=False, **edge))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=8.5)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow."""
    style = {"arrowstyle": "->", "color": GREY, "linewidth": 1.3}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def one_batch() -> Any:
    """Draw one step of three requests: prompts, rows, base product and updates, answers."""
    figure, axes = _canvas(74, 30)
    rows = [
        ("A in slot 2", GREEN, "B₂(A₂ x)"),
        ("no adapter", GREY, ""),
        ("B in slot 0", BLUE, "B₀(A₀ x)"),
        ("padding", GREY, ""),
    ]
    for place, title in ((1, "requests"), (16, "rows"), (33, "every projection"), (59, "logits")):
        axes.text(place, 1.5, title, fontsize=9, fontweight="bold")
    _box(axes, 33, 4, 9, 22.5, "W x\nonce,\nfor all\nrows", ORANGE)
    for index, (name, colour, update) in enumerate(rows):
        y = 4 + index * 6
        dashed = {"linestyle": "--"} if name == "padding" else {}
        if not dashed:
            _box(axes, 1, y, 11, 4.5, name, colour)
            _arrow(axes, (12, y + 2.2), (16, y + 2.2))
            _arrow(axes, (54.5, y + 2.2), (59, y + 2.2))
            _box(axes, 59, y, 13, 4.5, "next token", colour)
        row = f"row {index}" if name != "padding" else "row 3: padding"
        _box(axes, 16, y, 12, 4.5, row, colour, **dashed)
        _arrow(axes, (28, y + 2.2), (33, y + 2.2))
        if update:
            axes.text(43.7, y + 2.2, "+", ha="center", va="center", fontsize=10)
            _box(axes, 45, y, 9, 4.5, update, colour)
        else:
            axes.plot([42, 54.5], [y + 2.2] * 2, color=GREY, linewidth=1.3, linestyle=":")
    axes.text(1, 28.7, "one graph: 4 rows, 2 groups", fontsize=8.5, style="italic")
    return figure


def layers() -> Any:
    """Draw the folders as rows; each imports only from those above it."""
    figure, axes = _canvas(74, 37)
    parts = [
        ("config/", "what the user chose", GREY),
        ("ops/", "launches: tensors and ints in, nothing else", ORANGE),
        ("batch.py, step_buffers.py", "what one step is, at fixed addresses", BLUE),
        ("lora/", "adapters: folder, host memory, slot", GREEN),
        ("graphs/", "freeze, replay, choose", BLUE),
        ("model/", "the Llama", ORANGE),
        ("runner.py, warmup.py", "one step; what is captured first", BLUE),
        ("engine/", "many steps: requests, scheduler, sampler, LLM", GREY),
        ("testing/", "the harness and the oracle", GREEN),
    ]
    for index, (name, what, colour) in enumerate(parts):
        _box(axes, 1, 1 + index * 4, 26, 3.2, name, colour)
        axes.text(29, 2.6 + index * 4, what, va="center", fontsize=8.5)
    _arrow(axes, (72, 36), (72, 1))
    axes.text(71, 18, "imports", rotation=90, ha="right", va="center", fontsize=8.5)
    return figure


def full_and_piecewise() -> Any:
    """Draw a FULL graph as one block and a PIECEWISE graph as pieces with gaps."""
    figure, axes = _canvas(74, 21)
    axes.text(1, 2, "FULL: every request has one row", fontsize=9, fontweight="bold")
    _box(axes, 1, 3.5, 72, 5, "embedding, layers with attention, lm_head: one replay", BLUE)
    title = "PIECEWISE: any step; attention runs between the pieces, on the real rows"
    axes.text(1, 12, title, fontsize=9, fontweight="bold")
    pieces = [("embedding, qkv", 14), ("attention", 8), ("o, MLP, qkv", 14), ("attention", 8)]
    pieces += [("o, MLP, norm", 12), ("gather,\nlm_head", 8)]
    x = 1.0
    for index, (name, width) in enumerate(pieces):
        replayed = index % 2 == 0
        style = {} if replayed else {"linestyle": "--"}
        _box(axes, x, 13.5, width, 5, name, BLUE if replayed else ORANGE, **style)
        x += width + 0.5
    axes.text(1, 20.5, "solid: replayed    dashed: launched by Python", fontsize=8, style="italic")
    return figure


def three_places() -> Any:
    """Draw where an adapter can be."""
    figure, axes = _canvas(74, 17)
    _box(axes, 1, 4, 17, 9, "folder\n(PEFT files)", GREY)
    _box(axes, 27, 4, 20, 9, "host memory\nat most max_cpu_loras", BLUE)
    _box(axes, 54, 4, 19, 9, "slot on the device\nat most max_loras", GREEN)
    _arrow(axes, (18, 8), (27, 8))
    _arrow(axes, (47, 8), (54, 8))
    axes.text(22.5, 4, "read,\ncheck", ha="center", fontsize=8)
    axes.text(50.5, 4, "zero,\ncopy", ha="center", fontsize=8)
    texts = ((37, "dropped when idle, read again"), (64, "never taken while in use"))
    for x, text in texts:
        axes.text(x, 15.5, text, ha="center", fontsize=8, style="italic")
    return figure


DIAGRAMS: dict[str, Callable[[], Any]] = {
    "one-batch": one_batch,
    "layers": layers,
    "full-and-piecewise": full_and_piecewise,
    "three-places": three_places,
}


_COLOURS = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def svg_file(name: str) -> str:
    """Return a diagram as a file of its own, for a README: it follows the reader's scheme."""
    svg = _draw(name)
    end = svg.index(">") + 1
    return f"{svg[:end]}\n{_COLOURS}{svg[end:]}\n"


def diagram(name: str) -> str:
    """Return a diagram as an HTML figure; its docstring says what it shows to who cannot see it.

    Raises:
        KeyError: there is no diagram of that name.
    """
    return f"<figure>\n{_draw(name)}\n</figure>"


def _draw(name: str) -> str:
    use_style()
    plt.rcParams["svg.hashsalt"] = name
    drawn = DIAGRAMS[name]()
    svg = as_svg(drawn, (DIAGRAMS[name].__doc__ or "").removeprefix("Draw ").rstrip("."))
    plt.close(drawn)
    return svg


if __name__ == "__main__":  # the README's figure
    path = Path(__file__).parents[1] / "assets" / "one-batch.svg"
    path.write_text(svg_file("one-batch"), encoding="utf-8")
