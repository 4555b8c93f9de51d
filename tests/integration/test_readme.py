"""Every Python block of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
def test_block_runs(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


def test_blocks_were_found() -> None:
    assert len(BLOCKS) == 2
