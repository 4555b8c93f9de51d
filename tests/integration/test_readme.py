"""Every Python block of the README and of the how-to pages runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": 2, "docs/plugins.md": 2, "docs/transformers.md": 1}
"""With how many blocks each has."""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(("page", "index"), [(page, index) for page, count in PAGES.items() for index in range(count)])
def test_block_runs(page: str, index: int) -> None:
    exec(compile(blocks(page)[index], page, "exec"), {})


def test_all_blocks_run() -> None:
    assert {page: len(blocks(page)) for page in PAGES} == PAGES
