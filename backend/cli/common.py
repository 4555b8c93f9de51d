"""What several commands share: an argument type, when a progress bar shows, and how a report is written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvproof.allocator import KvproofError


def count(text: str) -> int:
    """An argument that counts something: an integer from 1 up."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


count.__name__ = "integer"  # argparse names it when `text` is no number


def on_terminal() -> dict[str, Any]:
    """Options of a progress bar that shows on a terminal only, and leaves nothing behind, not even an empty line."""
    from rich.console import Console

    console = Console(stderr=True)
    return {"console": console, "transient": True, "disable": not console.is_interactive}


def write_report(folder: Path, files: dict[str, str]) -> None:
    """Texts by the names of their files in `folder`, which is made if it is not there. Raises `KvproofError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvproofError(f"can't write the report: {error}") from None
