"""The benchmark report's plots: curves over sizes, and ratios as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import shorten

from kvproof.cli.bench_figures import Curve, Ratio, named, shown
from kvproof.fuzz.svg import COLOURS, WIDTH, curve, drawing, labelled, logarithmic, text

LEFT, RIGHT, TOP = 80, WIDTH - 20, 20
PLOT = 240  # the height of the plotting area
ROW = 22  # of a bar, and of a line in the legend
LABELS = 400  # the width of the labels beside the bars, which has room for so many letters
LETTERS = 62


def curves(drawn: Sequence[Curve]) -> str:
    """Lines of one chart. The horizontal axis is logarithmic, from 1 up; the vertical one begins at 0."""
    xs = sorted({x for one in drawn for x, _ in one.points})
    across = logarithmic(xs, LEFT, RIGHT)
    most = max(y for one in drawn for _, y in one.points) or 1.0
    bottom = TOP + PLOT

    def up(y: float) -> float:
        return bottom - PLOT * y / most

    parts = [text(4, TOP - 8, drawn[0].y), text((LEFT + RIGHT) / 2, bottom + 40, drawn[0].x, "middle")]
    for quarter in range(5):
        y = up(most * quarter / 4)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{most * quarter / 4:.3g}", "end"))
    parts += [text(place, bottom + 18, f"{x:,}", "middle") for x, place in labelled(xs, across)]
    for i, one in enumerate(drawn):
        colour = COLOURS[i % len(COLOURS)]
        places = [(across(x), up(y)) for x, y in sorted(one.points)]
        dashes = ' stroke-dasharray="6 3"' if i >= len(COLOURS) else ""
        parts += curve(places, colour, radius=3, dashes=dashes)
        y = bottom + 62 + ROW * i
        parts.append(f'<path d="M{LEFT} {y - 4}h20" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(text(LEFT + 26, y, one.line))
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{RIGHT}" fill="none" stroke="black"/>')
    return drawing(parts, bottom + 56 + ROW * len(drawn))


def ratios(rows: Sequence[Ratio]) -> str:
    """A bar for each ratio, from 1, on a logarithmic axis; a mark where its aim is."""
    values = [value for ratio in rows for value in (ratio.value, ratio.aim or 1.0)]
    low, high = math.log(min(0.8, *values)), math.log(max(1.25, *values))
    room = WIDTH - LABELS - 60

    def across(value: float) -> float:
        return LABELS + room * (math.log(value) - low) / (high - low)

    one, parts = across(1.0), list[str]()
    for i, ratio in enumerate(rows):
        y, end = i * ROW, across(ratio.value)
        good = (ratio.value >= 1) == ratio.more_is_better
        label = ", ".join(filter(None, (named(ratio.benchmark), ratio.detail)))
        parts.append(text(LABELS - 8, y + 15, shorten(label, LETTERS, placeholder="..."), "end"))
        parts.append(
            f'<rect x="{min(one, end):.1f}" y="{y + 4}" width="{abs(end - one):.1f}" height="14" '
            f'fill="{COLOURS[2] if good else COLOURS[1]}"/>'
        )
        if ratio.aim is not None:
            parts.append(f'<path d="M{across(ratio.aim):.1f} {y + 1}v20" stroke="black" stroke-width="2"/>')
        parts.append(text(max(one, end, across(ratio.aim or 1.0)) + 6, y + 15, shown(ratio.value)))
    parts.append(f'<path d="M{one:.1f} 0v{ROW * len(rows)}" stroke="#888888"/>')
    return drawing(parts, ROW * len(rows))
