"""The layers: who may import whom, what the core must not load, and what an installation must contain."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
with (ROOT / "pyproject.toml").open("rb") as file:
    SETUPTOOLS = tomllib.load(file)["tool"]["setuptools"]
FOLDERS: dict[str, str] = {folder: package for package, folder in SETUPTOOLS["package-dir"].items()}
LAYERS: dict[str, set[str]] = {  # the layers that each may import beside itself
    "allocator": set(),
    "attention": {"allocator"},
    "backend": {"allocator", "attention"},
    "fuzz": {"allocator", "attention", "backend"},
    "cli": {"allocator", "attention", "backend", "fuzz"},
}


def package_of(path: Path) -> str:
    """The installed name of the folder that `path` lies in; one that is not mapped follows its parent."""
    folder, below = path.parent.relative_to(ROOT), list[str]()
    while folder.as_posix() not in FOLDERS:
        below.insert(0, folder.name)
        folder = folder.parent
    return ".".join([FOLDERS[folder.as_posix()], *below])


SOURCES = {
    path: package_of(path)
    for folder in sorted({f.split("/")[0] for f in FOLDERS})
    for path in ROOT.glob(f"{folder}/**/*.py")
}
TESTS = sorted(ROOT.glob("tests/**/*.py"))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Every imported module, wherever in the file the statement stands, and where that is."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((module, f"{path.relative_to(ROOT)}:{node.lineno} imports {module}") for module in modules)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer: str) -> None:
    allowed = LAYERS[layer] | {layer}
    upwards = [
        where
        for path, package in SOURCES.items()
        for module, where in imports(path)
        if package.split(".")[1] == layer and module.startswith("kvproof.") and module.split(".")[1] not in allowed
    ]
    assert upwards == []


def test_the_core_imports_nothing_large() -> None:
    allowed = {*sys.stdlib_module_names, "kvproof", "pydantic", "xxhash"}
    foreign = [
        where
        for path, package in SOURCES.items()
        for module, where in imports(path)
        if package == "kvproof.allocator" and module.split(".")[0] not in allowed
    ]
    assert foreign == []


def test_no_bare_and_no_relative_imports() -> None:
    """By their bare names the folders would be imported a second time, with a second copy of every class."""
    forbidden = {"", *(folder.split("/")[0] for folder in FOLDERS)}
    wrong = [
        where for path in [*SOURCES, *TESTS] for module, where in imports(path) if module.split(".")[0] in forbidden
    ]
    assert wrong == []


def test_importing_the_core_loads_nothing_large(tmp_path: Path) -> None:
    heavy = ["torch", "numpy", "pydantic", "hypothesis", *(f"kvproof.{layer}" for layer in LAYERS if LAYERS[layer])]
    script = f"import sys, kvproof.allocator; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_package_is_listed_and_has_a_layer() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(set(SOURCES.values()))
    assert {package.split(".")[1] for package in SETUPTOOLS["packages"]} == set(LAYERS)


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_the_installation_has_every_module(package: str) -> None:
    layer, *below = package.removeprefix("kvproof.").split(".")
    spec = importlib.util.find_spec(f"kvproof.{layer}")  # not the package's own: that would import its parent
    assert spec is not None
    assert spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0], *below)
    here = {path for path in SOURCES if SOURCES[path] == package}
    if installed.resolve() in {path.parent for path in here}:
        pytest.skip("kvproof is imported from the folders themselves")
    there = {path.name for path in installed.glob("*.py")}
    assert there == {path.name for path in here}, f"{installed} is out of date: run `make dev`"
