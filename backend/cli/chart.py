"""A line chart as SVG text, so that a plot needs no package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 680, 70, 380  # the plotting area
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)  # Okabe and Ito: safe for colour-blind eyes
LABEL_WIDTH = 64  # of a tick on the horizontal axis

Point = tuple[int, float]


def line_chart(lines: Mapping[str, Sequence[Point]], *, title: str, x_label: str, y_label: str) -> str:
    """Named lines of points (x, y), x at least 1 and drawn on a logarithmic scale, y a share from 0 to 1."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    low, high = math.log(xs[0]), math.log(xs[-1])
    top = max(1, math.ceil(10 * max(y for points in lines.values() for _, y in points))) / 10

    def across(x: int) -> float:
        return LEFT + (RIGHT - LEFT) * ((math.log(x) - low) / (high - low) if high > low else 0.5)

    def up(y: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * y / top

    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text((LEFT + RIGHT) / 2, 28, title, 'font-size="16" font-weight="bold"'),
        _text((LEFT + RIGHT) / 2, HEIGHT - 16, x_label),
        _text(20, (TOP + BOTTOM) / 2, y_label, f'transform="rotate(-90 20 {(TOP + BOTTOM) / 2})"'),
    ]
    for tenth in range(round(top * 10) + 1):
        y = up(tenth / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tenth / 10:.0%}", anchor="end"))
    last = -math.inf
    for x in xs:
        if across(x) - last >= LABEL_WIDTH:
            last = across(x)
            parts.append(f'<path d="M{last:.1f} {BOTTOM}v5" stroke="black"/>')
            parts.append(_text(last, BOTTOM + 20, f"{x:,}"))
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [(across(x), up(y)) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        parts.append(f'<path d="M{LEFT + 110 * i} 50h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(LEFT + 110 * i + 26, 54, name, anchor="start"))
    parts.append(f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="black"/>')
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view}>'
    return "\n".join([head, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'
