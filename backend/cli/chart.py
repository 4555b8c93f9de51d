"""A line chart as SVG text, so that a plot needs no package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from kvproof.fuzz.svg import COLOURS, curve, labelled, logarithmic

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 680, 70, 380  # the plotting area

Point = tuple[int, float]


def line_chart(lines: Mapping[str, Sequence[Point]], *, title: str, x_label: str, y_label: str) -> str:
    """Named lines of points (x, y), x at least 1 and drawn on a logarithmic scale, y a share from 0 to 1."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    across = logarithmic(xs, LEFT, RIGHT)
    top = max(1, math.ceil(10 * max(y for points in lines.values() for _, y in points))) / 10

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
    for x, place in labelled(xs, across):
        parts.append(f'<path d="M{place:.1f} {BOTTOM}v5" stroke="black"/>')
        parts.append(_text(place, BOTTOM + 20, f"{x:,}"))
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [(across(x), up(y)) for x, y in sorted(points)]
        parts += curve(places, colour, radius=4)
        parts.append(f'<path d="M{LEFT + 110 * i} 50h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(LEFT + 110 * i + 26, 54, name, anchor="start"))
    parts.append(f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="black"/>')
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view}>'
    return "\n".join([head, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'
