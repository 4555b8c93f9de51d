"""The parts that every report is made of: one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em; color: #222 }
svg { font: 12px sans-serif; max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: 14px } td, th { padding: 2px 12px 2px 0; text-align: right }
td:first-child, th:first-child { text-align: left } pre { background: #f4f4f4; padding: 8px; overflow-x: auto }
.failed { color: #b00020 } .note { color: #666 }
"""


def page(title: str, sections: Iterable[str]) -> str:
    """The whole page; `sections` are HTML."""
    body = "\n".join(sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def heading(told: str, *, failed: bool = False) -> str:
    return f'<h1 class="{"failed" if failed else ""}">{escape(told)}</h1>'


def note(told: str) -> str:
    return f'<p class="note">{escape(told)}</p>'


def details(summary: str, told: str) -> str:
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(told)}</pre></details>"


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def row(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
