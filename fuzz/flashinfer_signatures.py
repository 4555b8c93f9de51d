"""The signatures of FlashInfer's paged wrappers in each release, read from its wheel without importing it.

pip download --no-deps --dest wheels flashinfer-python==0.7.4
python -m kvproof.fuzz.flashinfer_signatures wheels/*.whl > tests/data/flashinfer_signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

WRAPPERS = {  # and where they are, which differs between releases
    "BatchDecodeWithPagedKVCacheWrapper": ("flashinfer/decode.py",),
    "BatchPrefillWithPagedKVCacheWrapper": ("flashinfer/prefill.py",),
    "BatchAttention": ("flashinfer/attention.py", "flashinfer/attention/_core.py"),
}
METHODS = ("__init__", "plan", "run", "workspace_size")
FUNCTIONS = {"merge_state_in_place": "flashinfer/cascade.py"}
# From 0.6.18 on plan(..., **kwargs) hands its keywords to this method, which has the true signature.
TRUE_PLAN = "_plan_impl"


Signatures = dict[str, dict[str, dict[str, str]]]


def signatures(wheel: Path) -> Signatures:
    """For each wrapper and method, its required and optional parameters, each as names divided by spaces.

    A function has the one method "__call__". Not every release has the method workspace_size.
    """
    with ZipFile(wheel) as archive:
        present = set(archive.namelist())

        def body(*paths: str) -> list[ast.stmt]:
            (path,) = present.intersection(paths)
            return ast.parse(archive.read(path).decode()).body

        tables = {name: dict(_methods(body(*paths), name)) for name, paths in WRAPPERS.items()}
        for name, path in FUNCTIONS.items():
            (found,) = (node for node in body(path) if isinstance(node, ast.FunctionDef) and node.name == name)
            tables[name] = {"__call__": _parameters(found.args, skip=0)}
        return tables


def _methods(body: list[ast.stmt], wrapper: str) -> Iterator[tuple[str, dict[str, str]]]:
    (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == wrapper)
    # Overloads come before what they declare, so the last definition of a name is the one that runs.
    methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    for name in METHODS:
        if name not in methods:
            continue
        method = methods[name]
        if name == "plan" and method.args.kwarg is not None:
            method = methods[TRUE_PLAN]
        yield name, _parameters(method.args)


def _parameters(args: ast.arguments, skip: int = 1) -> dict[str, str]:
    positional = [argument.arg for argument in args.args]
    first_optional = len(positional) - len(args.defaults)
    required, optional = positional[skip:first_optional], positional[first_optional:]
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        (optional if default is not None else required).append(argument.arg)
    return {"required": " ".join(required), "optional": " ".join(optional)}


def main(wheels: list[str]) -> None:
    tables = {Path(wheel).name.split("-")[1]: signatures(Path(wheel)) for wheel in wheels}
    json.dump(tables, sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
