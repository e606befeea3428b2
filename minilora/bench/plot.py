"""A bar chart as SVG, for results that are better looked at than read."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_WIDTH, _BAR, _GAP, _LEFT, _RIGHT = 640, 22, 10, 210, 60
_SCHEMES = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"


def bars(values: Mapping[str, float], title: str, unit: str, inline: bool = False) -> str:
    """Return an SVG of one horizontal bar a name, each with its value.

    Args:
        values: by name, from top to bottom.
        title: what is shown.
        unit: of the values.
        inline: to stand in a page and take the colour of its text. A file of its own follows the
            reader's light or dark scheme.
    """
    largest = max(values.values(), default=0.0) or 1.0
    height = 40 + len(values) * (_BAR + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="13" '
        'fill="currentColor">',
        "" if inline else _SCHEMES,
        f'<text x="0" y="18" font-weight="bold">{escape(title)} ({escape(unit)})</text>',
    ]
    for index, (name, value) in enumerate(values.items()):
        y = 32 + index * (_BAR + _GAP)
        width = (_WIDTH - _LEFT - _RIGHT) * value / largest
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="#5c6bc0"/>'
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 16}">{value:.4g}</text>'
        )
    return "\n".join([*filter(None, parts), "</svg>", ""])
