"""`kvproof backends`: what is registered, and what of it can run here."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvproof.attention import Capabilities
    from kvproof.backend.selection import Verdict

EXAMPLE = """\
example:
  kvproof backends --json

The attention backends stand in the order in which --backend auto tries them.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "backends",
        help="list attention backends and model runners, and why one can't run",
        description="List the registered plugins with their origin, and whether they can run on this machine.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvproof.backend.selection import survey

    rows = [_attention_row(verdict) for verdict in survey()] + _other_rows()
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    return 0


def _attention_row(verdict: Verdict) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": "attention backend",
        "name": verdict.plugin.name,
        "origin": verdict.plugin.origin,
        "available": verdict.backend is not None,
        "reason": verdict.reason,
        "auto": verdict.backend is not None and verdict.priority >= 0,
    }
    if verdict.backend is not None:
        row["capabilities"] = _declared(verdict.backend.capabilities())
    return row


def _declared(capabilities: Capabilities) -> dict[str, list[Any]]:
    """What is limited, and to what; a limit that isn't there is left out."""
    limits = {field.name: getattr(capabilities, field.name) for field in fields(capabilities)}
    return {name: sorted(values) for name, values in limits.items() if values is not None}


def _other_rows() -> list[dict[str, Any]]:
    from kvproof.backend.registry import BrokenPlugin, Group, plugins

    rows = []
    for group in (Group.RUNNER, Group.POLICY):
        for plugin in plugins(group).values():
            reason = ""
            try:
                plugin.load()
            except BrokenPlugin as error:
                reason = str(error)
            rows.append(
                {
                    "kind": group.noun,
                    "name": plugin.name,
                    "origin": plugin.origin,
                    "available": not reason,
                    "reason": reason,
                }
            )
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "name", "origin", "available", "details", box=None, header_style="bold")
    for row in rows:
        details = row["reason"] or "; ".join(
            f"{name} {', '.join(map(str, values))}" for name, values in row.get("capabilities", {}).items()
        )
        table.add_row(row["kind"], row["name"], row["origin"], "yes" if row["available"] else "no", details)
    Console().print(table)
