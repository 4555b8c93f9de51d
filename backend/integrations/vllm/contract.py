"""The record of what we touch of vLLM, for each version, and what has moved since; `surface` says what that is.

Nothing here imports vLLM: sources are read, so that a release can be looked at without being installed.

    python -m kvproof.backend.integrations.vllm.contract [FOLDER]            what has moved, exit code 1 if anything has
    python -m kvproof.backend.integrations.vllm.contract --record [FOLDER]   record FOLDER's version in contract.json

FOLDER is a `vllm` package, such as one from an unpacked wheel; by default the installed one.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvproof.backend.integrations.vllm.errors import UnsupportedVllm
from kvproof.backend.integrations.vllm.surface import ABSTRACT, ASKERS, FIELDS, NAMES, SIGNATURES

FORCE = "KVPROOF_VLLM_UNTESTED"
"""The environment variable that lets unrecorded versions through, with a warning that names what has moved."""

RECORD = Path(__file__).with_name("contract.json")


def minor(version: str) -> str:
    """The part of a version that the record goes by: "0.32" of "0.32.0+cpu"."""
    return ".".join(version.split(".")[:2])


@cache
def recorded() -> dict[str, dict[str, str]]:
    """The surface of each known version, oldest first."""
    record: dict[str, dict[str, str]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def require_known(version: str) -> None:
    """Raise `UnsupportedVllm` for a version that is not on record, unless `FORCE` is set: then warn of what moved."""
    if minor(version) in recorded():
        return
    known = ", ".join(recorded())
    if os.environ.get(FORCE) != "1":
        raise UnsupportedVllm(f"vLLM {version} is not among the tested versions {known}; {FORCE}=1 tries it anyway")
    moved = "; ".join(drift(installed())) or "nothing that we know of has moved"
    warnings.warn(f"vLLM {version} is untested, known are {known}: {moved}", RuntimeWarning, stacklevel=2)


def installed() -> Path:
    """The folder of the installed vLLM, which is not imported. Raises `UnsupportedVllm` where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedVllm("vLLM is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def version_of(folder: Path) -> str:
    """The version of the vLLM in `folder`."""
    for node in _parse(folder / "_version.py").body:
        if isinstance(node, ast.Assign) and "version" in [ast.unparse(target) for target in node.targets]:
            return str(ast.literal_eval(node.value))
    raise UnsupportedVllm(f"{folder / '_version.py'} tells no version")


def drift(folder: Path) -> list[str]:
    """What is not as recorded: for the version in `folder` if that is known, else for the newest known one."""
    record = recorded()
    version = minor(version_of(folder))
    known = record.get(version) or record[list(record)[-1]]
    found = surface(folder)
    moved = []
    for name in dict.fromkeys([*known, *found]):
        before, now = known.get(name, "nothing"), found.get(name, "nothing")
        if before != now:
            moved.append(f"{name} was {before} and is {now}")
    return moved


def surface(folder: Path) -> dict[str, str]:
    """All that we touch of the vLLM in `folder`, as text that can be compared."""
    found = {f"{module}:{name}": _export(folder, module, name) for module, names in NAMES.items() for name in names}
    found |= {name: _signature(folder, name) for name in SIGNATURES}
    found |= {f"{name}.{field}": _presence(folder, name, field) for name, fields in FIELDS.items() for field in fields}
    found |= {f"abstract in {name}": _abstract(folder, name) for name in ABSTRACT}
    return found | {f"asked: {name}": where for name, where in asked(folder).items()}


def asked(folder: Path) -> dict[str, str]:
    """What vLLM's schedulers and engine ask of a KV-cache manager, dotted, with the files that do."""
    names: dict[str, set[str]] = {}
    for file in ASKERS:
        tree = _parse(folder / file)
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                chain = _chain(node)
                for manager in ("kv_cache_manager", "cache_manager"):
                    if manager in chain[:-1]:
                        names.setdefault(".".join(chain[chain.index(manager) + 1 :][:2]), set()).add(file)
    return {name: ", ".join(sorted(names[name])) for name in sorted(names)}


def _chain(node: ast.expr) -> list[str]:
    """The names of a dotted expression."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _export(folder: Path, module: str, name: str) -> str:
    """Whether a module has the name: its own, or an imported one."""
    path = folder.joinpath(*module.split(".")[1:])
    for node in _parse(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        else:
            names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        if name in names:
            return "there"
    return "missing"


def _signature(folder: Path, name: str) -> str:
    file, _, path = name.partition(":")
    found = _find(folder / file, path.split("."))
    if not isinstance(found, ast.FunctionDef):
        return "missing"
    arguments = found.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def _presence(folder: Path, name: str, field: str) -> str:
    file, _, path = name.partition(":")
    found = _find(folder / file, [path])
    return "there" if isinstance(found, ast.ClassDef) and field in set(_fields(found)) else "missing"


def _abstract(folder: Path, name: str) -> str:
    file, _, path = name.partition(":")
    found = _find(folder / file, [path])
    methods = (
        [node for node in found.body if isinstance(node, ast.FunctionDef)] if isinstance(found, ast.ClassDef) else []
    )
    return ", ".join(m.name for m in methods if "abstractmethod" in [ast.unparse(d) for d in m.decorator_list])


def _fields(found: ast.ClassDef) -> Iterator[str]:
    """What a class declares, defines, and sets on itself in its methods."""
    yield from (ast.unparse(target) for node in found.body if isinstance(node, ast.Assign) for target in node.targets)
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _find(file: Path, path: list[str]) -> ast.stmt | None:
    body, found = _parse(file).body, None
    for name in path:
        found = next(
            (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name), None
        )
        body = found.body if found is not None else []
    return found


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare a vLLM with the record of what we touch of it.")
    parser.add_argument("folder", nargs="?", type=Path, help="a vllm package; by default the installed one")
    parser.add_argument("--record", action="store_true", help="record its version, or record it anew")
    args = parser.parse_args(arguments)
    folder = args.folder or installed()
    version = version_of(folder)
    if args.record:
        record = (recorded() if RECORD.exists() else {}) | {minor(version): surface(folder)}
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"recorded vLLM {version}\n")
        return 0
    moved = drift(folder)
    sys.stdout.write(f"vLLM {version}: {len(moved)} moved\n" + "".join(f"  {line}\n" for line in moved))
    return 1 if moved else 0


if __name__ == "__main__":
    raise SystemExit(main())
