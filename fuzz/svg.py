"""The parts that every drawing is made of: inline SVG without script, font or file beside the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito: safe for colour-blind eyes."""

WIDTH = 720

LABEL_WIDTH = 64
"""Of a number under a horizontal axis."""


def logarithmic(xs: Sequence[int], left: float, right: float) -> Callable[[int], float]:
    """Where each x is drawn on an axis from the first of the sorted `xs` to the last; a lone one in the middle."""
    low, high = math.log(xs[0]), math.log(xs[-1])
    return lambda x: left + (right - left) * ((math.log(x) - low) / (high - low) if high > low else 0.5)


def labelled(xs: Sequence[int], across: Callable[[int], float]) -> Iterator[tuple[int, float]]:
    """Those of the sorted `xs` whose labels don't run into each other, and where they are drawn."""
    last = -math.inf
    for x in xs:
        if across(x) - last >= LABEL_WIDTH:
            last = across(x)
            yield x, last


def curve(places: Sequence[tuple[float, float]], colour: str, *, radius: int, dashes: str = "") -> list[str]:
    """A line through `places`, with a dot at each."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    return [line, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in places)]


def text(x: float, y: float, told: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(told)}</text>'


def drawing(parts: Sequence[str], height: int) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, *parts, "</svg>"])
