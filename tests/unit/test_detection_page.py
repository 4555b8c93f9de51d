"""docs/detection.md has every fault that can be planted, and each was found from as many seeds as it has to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="some of the faults are those of attention backends")

from kvproof.fuzz.catalogue import catalogue
from kvproof.fuzz.detection import FEW, REQUIRED

PAGE = (Path(__file__).parents[2] / "docs/detection.md").read_text(encoding="utf-8")
ROWS = {
    cells[0]: cells[1:]
    for line in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE)
    if not set(line) <= set("-:| ") and (cells := [cell.strip() for cell in line.split("|")])[0] != "fault"
}


def test_it_has_every_fault_and_no_other() -> None:
    assert set(ROWS) == set(catalogue())


@pytest.mark.parametrize("name", catalogue())
def test_each_fault_was_found_by_what_has_to_find_it(name: str) -> None:
    """To be measured anew when a fault goes to another machine or gets a scope."""
    planted = catalogue()[name]
    finder, of_seeds, *_, scope, transitions, _ = ROWS[name]
    assert (finder or None) == planted.finder
    assert (scope or None) == (None if planted.hunt is None else planted.hunt.scope)
    assert transitions != "MISSED"
    if finder:
        found, seeds = map(int, of_seeds.split(" of "))
        assert seeds in (FEW, 100)
        assert found >= REQUIRED * seeds
