"""What several commands share: an argument type, and when a progress bar shows."""

from __future__ import annotations

import argparse
from typing import Any


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
