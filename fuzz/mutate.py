"""Small changes to the syntax tree of a module, each of which some check should notice.

Not changed are type annotations, docstrings and the messages of exceptions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change in `where`, a function or a class, of a module: line `line`, which read `old`, now reads `new`."""

    module: str
    where: str
    in_function: bool
    line: int
    old: str
    new: str
    change: Change

    @property
    def name(self) -> str:
        """Stays the same when lines are added elsewhere."""
        return f"{self.module}.{self.where}: {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class Change:
    """What stands at `path` of a module's `tree` becomes `changed`; the tree itself is shared, and left as it was."""

    tree: ast.Module
    path: Path
    changed: ast.AST

    def compiled(self, file: str) -> CodeType:
        with self.made():
            return compile(ast.fix_missing_locations(self.tree), file, "exec")

    @contextmanager
    def made(self) -> Iterator[None]:
        original = _at(self.tree, self.path)
        _replace(self.tree, self.path, self.changed)
        try:
            yield
        finally:
            _replace(self.tree, self.path, original)


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of `source`, in the order of the lines."""
    tree = ast.parse(source)
    for place, (path, where, in_function) in enumerate(list(_places(tree))):
        original = _at(tree, path)
        for changed in _changes(original):
            change, statement = Change(tree, path, changed), _statement(path)
            old = _first_line(_at(tree, statement))
            with change.made():
                new = _first_line(_at(tree, statement))
            if old != new:
                yield Mutant(module, where, in_function, getattr(original, "lineno", place), old, new, change)


Path = tuple[tuple[str, int | None], ...]
"""From the root: a field, and the index in it if it is a list."""


def _places(tree: ast.Module) -> Iterator[tuple[Path, str, bool]]:
    """What may be changed, with the name of the function or class that it is in, and whether it is in a function."""

    def visit(node: ast.AST, path: Path, where: str, in_function: bool) -> Iterator[tuple[Path, str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield path, where, in_function
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".removeprefix("module.")
            in_function = in_function or isinstance(node, ast.FunctionDef)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(node, ast.Call):
                continue
            if isinstance(node, ast.Raise):
                continue
            for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not _is_text(child):
                    yield from visit(child, (*path, (field, i)), where, in_function)

    yield from visit(tree, (), "module", False)


def _is_text(node: ast.AST) -> bool:
    """A docstring, a message, or a type alias that is one."""
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [operator, *others], comparators) if type(operator) in OPERATORS:
            yield ast.Compare(left, [OPERATORS[type(operator)](), *others], comparators)  # type: ignore[list-item]
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)  # type: ignore[arg-type]
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(OPERATORS[type(operator)](), values)  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.If(test, body, orelse) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign(target, operator, value) if type(operator) in OPERATORS:
            yield ast.AugAssign(target, OPERATORS[type(operator)](), value)  # type: ignore[arg-type]
            yield ast.Pass()
        case ast.Expr(ast.Call() | ast.Yield()) | ast.Delete() | ast.Raise():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()], _):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _at(tree: ast.AST, path: Path) -> ast.AST:
    node = tree
    for field, i in path:
        value = getattr(node, field)
        node = value if i is None else value[i]
    return node


def _replace(tree: ast.AST, path: Path, changed: ast.AST) -> None:
    *_, (field, i) = path
    parent = _at(tree, path[:-1])
    if i is None:
        setattr(parent, field, changed)
    else:
        getattr(parent, field)[i] = changed


def _statement(path: Path) -> Path:
    """The innermost statement around the node at `path`."""
    bodies = [n for n, (field, _) in enumerate(path) if field in ("body", "orelse", "finalbody", "handlers")]
    return path[: bodies[-1] + 1]


def _first_line(node: ast.AST) -> str:
    """A simple statement, or the head of one that has others in it."""
    head = ast.unparse(node).split("\n")
    return next(line for line in head if not line.startswith("@")).strip()
