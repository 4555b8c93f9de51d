"""docs/field-failures.md names tests and faults that there are, and leaves out no fault that cites a report."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch", reason="some of the faults are those of attention backends")

from kvproof.fuzz.catalogue import catalogue

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/field-failures.md").read_text(encoding="utf-8")
REPORT = re.compile(r"\b[\w-]+#\d+|GHSA(?:-\w{4}){3}|\b[0-9a-f]{7,10}\b|\btest_\w+")
"""A number, an advisory, a commit, or one of somebody's own tests."""
UNFILED = re.compile(r"\((nano-vllm|transformers)\)")


class Row(NamedTuple):
    label: str
    reports: str
    tests: list[str]
    faults: list[str]


def rows() -> list[Row]:
    found = []
    for line in re.findall(r"^\| [A-Z]\d.*", PAGE, re.MULTILINE):
        _, label, reports, _, tests, faults, _, _ = (cell.strip() for cell in line.split("|"))
        reports = re.sub(r"\]\([^)]*\)", "]", reports)  # as it reads: an address has the number too
        found.append(Row(label, reports, re.findall(r"`([^`]*)`", tests), [*filter(None, faults.split("; "))]))
    return found


def strings_in(path: str) -> set[str]:
    """For faults in modules that can't be imported here: tests, and what needs vLLM."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_rows_have_labels_of_their_own() -> None:
    assert len({row.label for row in rows()}) == len(rows()) > 40


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.label)
def test_its_tests_and_faults_are_there(row: Row) -> None:
    assert row.tests
    for test in row.tests:
        module, _, name = test.partition("::")
        source = (ROOT / "tests/unit" / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {re.escape(name)}\(", source, re.MULTILINE), test
    known = {*catalogue(), *strings_in("tests/unit/test_flashinfer_faults.py")}
    assert set(row.faults) <= known | strings_in("fuzz/machines/vllm_faults.py")


def test_a_test_that_restates_a_row_is_in_it() -> None:
    tests = {row.label: " ".join(row.tests) for row in rows()}
    for path in sorted((ROOT / "tests/unit").glob("test_*.py")):
        for name, label in re.findall(
            r"^def (test_([lpeagm]\d+)_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert f"{path.stem}::{name}" in tests[label.upper()]


@pytest.mark.parametrize("name", [name for name, it in catalogue().items() if REPORT.search(it.fault.why)])
def test_a_fault_that_cites_a_report_is_in_its_row(name: str) -> None:
    for report in REPORT.findall(catalogue()[name].fault.why):
        assert any(name in row.faults and report in REPORT.findall(row.reports) for row in rows()), report


@pytest.mark.parametrize("name", [name for name, it in catalogue().items() if UNFILED.search(it.fault.why)])
def test_a_fault_of_an_engine_is_in_a_row_of_that_engine(name: str) -> None:
    for engine in UNFILED.findall(catalogue()[name].fault.why):
        assert any(name in row.faults and engine in row.reports for row in rows()), engine
