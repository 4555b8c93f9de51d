"""The reference leaves nothing out: docs/reference against the code that it describes."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import pytest

from kvproof.allocator import AllBlocksCleared, BlockRemoved, BlockStored, Stats
from kvproof.allocator.replay import ReplayResult
from kvproof.backend import EngineStats

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
FOLDERS = {
    "allocator": "allocator",
    "attention": "attention",
    "backend/cli": "cli",
    "backend": "backend",
    "fuzz": "fuzz",
}


def described() -> set[str]:
    """What is taken from docstrings, on any page, by its last name and its package."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: (kvproof\.\S+)$", pages, flags=re.MULTILINE))


@pytest.mark.parametrize("package", ["allocator", "attention", "backend", "fuzz.conformance"])
def test_every_public_name_is_there(package: str) -> None:
    tables = (REFERENCE / "events-and-metrics.md").read_text(encoding="utf-8")
    names = {name.rpartition(".")[2] for name in described()} | set(
        re.findall(r"^### (\w+)$", tables, flags=re.MULTILINE)
    )
    public = set(import_module(f"kvproof.{package}").__all__) - {"Event"}  # the union of the three events
    assert public - names == set()


def test_every_error_is_there() -> None:
    """By name, and not imported, since vLLM's are among them."""
    bases: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    bases.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)
    errors = {"KvproofError"}
    while more := {name for name, of in bases.items() if of & errors} - errors:
        errors |= more
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    assert {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)} == errors


@pytest.mark.parametrize("record", [BlockStored, BlockRemoved, AllBlocksCleared, Stats, EngineStats, ReplayResult])
def test_every_field_is_there(record: type) -> None:
    page = (REFERENCE / "events-and-metrics.md").read_text(encoding="utf-8")
    section = page.partition(f"### {record.__name__}\n")[2].partition("\n#")[0]
    assert is_dataclass(record)
    properties = [name for name, value in vars(record).items() if isinstance(value, property)]
    documented = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert documented == [field.name for field in fields(record)] + properties


def test_every_entry_point_is_there() -> None:
    page = (REFERENCE / "entry-points.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \| `(\S+:\S+)` \|$", page, flags=re.MULTILINE)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert sorted(rows) == sorted((group, *entry) for group, names in groups.items() for entry in names.items())
