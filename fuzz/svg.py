"""The parts that every drawing is made of: inline SVG without script, font or file beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito: safe for colour-blind eyes."""

WIDTH = 720


def text(x: float, y: float, told: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(told)}</text>'


def drawing(parts: Sequence[str], height: int) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, *parts, "</svg>"])
