"""Bars and lines as inline SVG: no script, no font and no file beside the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproof.fuzz.svg import COLOURS, WIDTH, drawing, text

ROW = 22
LABELS = 230  # the width of the labels beside the bars


def bars(rows: Sequence[tuple[str, int, int]]) -> str:
    """A bar for each (label, part, whole), long as the part is of the whole; all wholes fill the width."""
    drawn = []
    room = WIDTH - LABELS - 140
    for i, (label, part, whole) in enumerate(rows):
        y = i * ROW
        length = room * part / whole if whole else 0
        drawn.append(text(LABELS - 8, y + 15, label, "end"))
        drawn.append(f'<rect x="{LABELS}" y="{y + 4}" width="{room}" height="14" fill="#eeeeee"/>')
        drawn.append(f'<rect x="{LABELS}" y="{y + 4}" width="{length:.1f}" height="14" fill="{COLOURS[0]}"/>')
        drawn.append(text(LABELS + room + 8, y + 15, f"{part:,} of {whole:,}"))
    return drawing(drawn, len(rows) * ROW)


def counts(rows: Mapping[str, int]) -> str:
    """A bar for each count, the largest filling the width."""
    drawn = []
    room, largest = WIDTH - LABELS - 140, max([*rows.values(), 1])
    for i, (label, count) in enumerate(rows.items()):
        y = i * ROW
        length = room * count / largest
        drawn.append(text(LABELS - 8, y + 15, label, "end"))
        drawn.append(f'<rect x="{LABELS}" y="{y + 4}" width="{length:.1f}" height="14" fill="{COLOURS[2]}"/>')
        drawn.append(text(LABELS + length + 8, y + 15, f"{count:,}"))
    return drawing(drawn, len(rows) * ROW)


def lines(curves: Mapping[str, Sequence[tuple[int, int]]], x_label: str, y_label: str) -> str:
    """Curves through the origin, on linear axes."""
    height, left, bottom, top = 320, 80, 270, 40
    right = WIDTH - 20
    last = max([x for curve in curves.values() for x, _ in curve] + [1])
    most = max([y for curve in curves.values() for _, y in curve] + [1])
    drawn = [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="black"/>']
    for quarter in range(5):
        x, y = left + (right - left) * quarter / 4, bottom - (bottom - top) * quarter / 4
        drawn.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#dddddd"/>')
        drawn.append(text(left - 8, y + 4, f"{most * quarter // 4:,}", "end"))
        drawn.append(text(x, bottom + 18, f"{last * quarter // 4:,}", "middle"))
    for i, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = [(0, 0), *curve]
        places = " ".join(
            f"{left + (right - left) * x / last:.1f},{bottom - (bottom - top) * y / most:.1f}" for x, y in points
        )
        drawn.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(f'<path d="M{left + 110 * i} 16h20" stroke="{colour}" stroke-width="2"/>')
        drawn.append(text(left + 26 + 110 * i, 20, name))
    drawn.append(text((left + right) / 2, height - 8, x_label, "middle"))
    drawn.append(text(4, top - 8, y_label))
    return drawing(drawn, height)
