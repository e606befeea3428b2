"""A bar chart as SVG, for results that are better looked at than read."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_WIDTH, _BAR, _GAP, _LEFT, _RIGHT = 640, 22, 10, 170, 80


def bars(values: Mapping[str, float], title: str, unit: str) -> str:
    """Return an SVG of one horizontal bar a name, each with its value.

    The colours follow the reader's light or dark scheme.
    """
    largest = max(values.values(), default=0.0) or 1.0
    height = 40 + len(values) * (_BAR + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="13">',
        "<style>text{fill:#222}rect{fill:#3f51b5}@media(prefers-color-scheme:dark)"
        "{text{fill:#ddd}rect{fill:#8c9eff}}</style>",
        f'<text x="0" y="18" font-weight="bold">{escape(title)} ({escape(unit)})</text>',
    ]
    for index, (name, value) in enumerate(values.items()):
        y = 32 + index * (_BAR + _GAP)
        width = (_WIDTH - _LEFT - _RIGHT) * value / largest
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 16}">{value:.4g}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
