"""Which function may change which part of the allocator's state.

The inductive proof (allocator/spec/PROOF.md) says that certain primitive transitions keep the invariants. It says
something about the code as long as nothing else writes the state: that is what `WRITERS` declares and these tests hold.
A new writer is welcome when it is made of primitives: add it here, and to the table in PROOF.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ALLOCATOR = Path(__file__).parents[2] / "allocator"


def declared(fields: dict[str, list[str]]) -> dict[str, set[str]]:
    """By field, the full names of the functions."""
    return {
        field: {f"{line.split(': ')[0]}.{name}" for line in lines for name in line.split(": ")[1].split()}
        for field, lines in fields.items()
    }


# By field: the functions that write it, or hand out the object itself, through which it could be written.
WRITERS = declared(
    {
        # BlockPool
        "_refs": ["pool.BlockPool: __init__ release share take"],
        "_content": ["pool.BlockPool: __init__ _evict publish withdraw"],
        "_empty": ["pool.BlockPool: __init__ _evict release take withdraw"],
        "_cached": ["pool.BlockPool: __init__ _evict release share withdraw"],
        # PrefixIndex
        "_lookup": ["index.PrefixIndex: __init__ _forget _spread add"],
        "_roots": ["index.PrefixIndex: __init__ _close_gap plant"],
        "_namespaces": ["index.PrefixIndex: __init__ _close_gap plant"],
        "_more_blocks": ["index.PrefixIndex: __init__ _forget carry remove"],
        "_last_number": ["index.PrefixIndex: __init__ _new restart"],
        "_records": ["index.PrefixIndex: __init__ _close_gap _forget _free _new _spread add make_room remove"],
        "_keys": ["index.PrefixIndex: __init__ add make_room"],
        "_more_key": ["index.PrefixIndex: __init__ _forget add"],
        "_free_places": ["index.PrefixIndex: __init__ _free _new make_room"],
        # Sequence
        "_tokens": [
            "sequence.Sequence: __init__ _fork append extend",
            "manager.BlockManager: truncate",
            "batch.DecodeBatch: _settle",
        ],
        "_hashes": [
            "prefix.PrefixCache: _hashes",
            "sequence.Sequence: __init__ _fork",
            "manager.BlockManager: truncate",
        ],
        "_table": [  # block_table hands it out for reading, _write_row copies it
            "sequence.Sequence: __init__ _fork block_table",
            "manager.BlockManager: _add_blocks _keep_slots _leave_window _merge _reserve admit fork release",
            "batch.DecodeBatch: _write_row",
        ],
        "_num_computed": [
            "sequence.Sequence: __init__",
            "manager.BlockManager: admit commit release truncate",
            "batch.DecodeBatch: _settle",
        ],
        "_num_reserved": [
            "sequence.Sequence: __init__",
            "manager.BlockManager: _keep_slots _reserve admit release",
            "batch.DecodeBatch: _serve_row",
        ],
        "_flight": [
            "sequence.Sequence: __init__ _fork",
            "flight.Flights: launch",
            "manager.BlockManager: release",
        ],
        # DecodeBatch, and what it keeps on its sequences
        "_batch": ["sequence.Sequence: __init__", "batch.DecodeBatch: _remove add"],
        "_row": ["sequence.Sequence: __init__", "batch.DecodeBatch: _remove add"],
        "_settled_at": ["sequence.Sequence: __init__", "batch.DecodeBatch: _settle add"],
        "_rows": ["batch.DecodeBatch: __init__ _remove add"],
        "_starved": ["batch.DecodeBatch: __init__ _publish_row _remove reserve"],
        "_log": ["batch.DecodeBatch: __init__ commit"],
        "_tables": ["batch.DecodeBatch: __init__ _fit _publish_row _serve_row _write_row block_tables"],
        "_num_steps": ["batch.DecodeBatch: __init__ commit"],
        # BlockManager and Flights
        "_admitted": ["manager.BlockManager: __init__ admit fork release"],
        "_pins": ["manager.BlockManager: __init__ pin unpin"],
        "_copies": ["manager.BlockManager: __init__ _reserve take_copies"],
        "_parked": ["flight.Flights: __init__ __len__ drop launch parked retire steps"],
        "_num_launched": ["flight.Flights: __init__ launch"],
    }
)

# By module: the fields of other modules' classes, private ones, that it may touch at all.
ELSEWHERE: dict[str, set[str]] = {
    "audit": {"_batch"},
    "batch": {"_batch", "_num_computed", "_num_reserved", "_row", "_settled_at", "_table", "_tokens"},
    "flight": {"_flight"},
    "manager": {"_batch", "_flight", "_hashes", "_num_computed", "_num_reserved", "_table", "_tokens"},
    "prefix": {"_hashes", "_table"},
    "snapshot": {"_copies", "_flight", "_pins"},
}

# By compiled loop (`_loops.c`): the function that holds the Python it stands for, the only one that may call it. So it
# writes what that function and those that it calls may write.
COMPILED = {
    "bind": "sequence",  # writes nothing
    "commit_batch": "batch.DecodeBatch.commit",
    "find_run": "prefix.PrefixCache.find",
    "hash_run": "prefix.PrefixCache._hashes",
    "publish_run": "prefix.PrefixCache.publish",
    "release_run": "pool.BlockPool.release_all",
    "reserve_batch": "batch.DecodeBatch.reserve",
    "share_run": "pool.BlockPool.share_all",
    "spread": "index.PrefixIndex._spread",
    "take_run": "prefix.PrefixCache._take_run",  # `BlockPool.take` with `_evicted`
    "token_array": "sequence.token_array",
}

# Fields that hold numbers: whoever reads one has no part of the state in hand.
PLAIN = {"_batch", "_flight", "_last_number", "_num_computed", "_num_launched", "_num_reserved",
         "_num_steps", "_row", "_settled_at"}  # fmt: skip
# Fields whose elements can be changed in their turn: every use counts.
NESTED = {"_parked"}
WRITING_METHODS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "sort", "update"}
READING_METHODS = {"copy", "count", "get", "index", "items", "keys", "tobytes", "tolist", "values"}
READING_CALLS = {"enumerate", "iter", "len", "list", "reversed", "set", "sorted", "sum", "tuple"}
READING_PLACES = (ast.BinOp, ast.Compare, ast.For, ast.If, ast.Starred, ast.UnaryOp, ast.While, ast.AugAssign,
                  ast.comprehension)  # fmt: skip


def uses(module: str, source: str) -> Iterator[tuple[str, str, bool]]:
    """Every field of `WRITERS` that is mentioned: its name, where, and whether it may be written there."""
    tree = ast.parse(source)
    parents = parents_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WRITERS:
            yield node.attr, place(module, node, parents), not only_reads(node, parents)


def parents_in(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def place(module: str, node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """The full name of the function that a node is in."""
    names = []
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
    return ".".join([module, *reversed(names)])


def only_reads(node: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether nothing can be written through this mention of a field. In doubt, it can."""
    if not isinstance(node.ctx, ast.Load) or node.attr in NESTED:
        return False
    around = parents[node]
    if node.attr in PLAIN:
        return not (isinstance(around, ast.Attribute) and around.attr in WRITING_METHODS)
    if isinstance(around, ast.Subscript) and around.value is node:
        return isinstance(around.ctx, ast.Load)
    if isinstance(around, ast.Attribute):
        return around.attr in READING_METHODS and isinstance(parents[around], ast.Call)
    if isinstance(around, ast.Call):
        if around.func is node:
            return True  # a method that has the name of a field
        return isinstance(around.func, ast.Name) and around.func.id in READING_CALLS
    if isinstance(around, ast.IfExp):
        return around.test is node
    return isinstance(around, READING_PLACES)


SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ALLOCATOR.glob("*.py"))}


def undeclared(module: str, source: str) -> list[str]:
    """The writers of `source` that `WRITERS` does not know, and the private fields that it has no business with."""
    wrong = set()
    for field, where, written in uses(module, source):
        at_home = f"{module}." in {f"{w.split('.')[0]}." for w in WRITERS[field] if w.endswith(".__init__")}
        if field.startswith("_") and not at_home and field not in ELSEWHERE.get(module, ()):
            wrong.add(f"{where} touches {field}")
        if written and where not in WRITERS[field]:
            wrong.add(f"{where} writes {field}")
    return sorted(wrong)


@pytest.mark.parametrize("module", SOURCES)
def test_only_declared_functions_write_the_state(module: str) -> None:
    assert undeclared(module, SOURCES[module]) == []


def test_every_declared_field_is_there() -> None:
    """A field that was renamed would be guarded no longer."""
    written = {field for module in SOURCES for field, _, writes in uses(module, SOURCES[module]) if writes}
    assert set(WRITERS) == written


def test_a_compiled_loop_is_called_where_its_python_is() -> None:
    calls = set()
    for module, source in SOURCES.items():
        tree = ast.parse(source)
        parents = parents_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "loops.compiled":
                calls.add((node.attr, place(module, node, parents)))
    assert calls == set(COMPILED.items())
    defined = re.findall(r"FUNCTION\((\w+)\)", (ALLOCATOR / "_loops.c").read_text(encoding="utf-8"))
    assert set(defined) - {"name"} == set(COMPILED)


@pytest.mark.parametrize("module", set(SOURCES) - {"guard"})  # which wraps methods
def test_no_field_is_reached_by_its_name(module: str) -> None:
    names = {node.id for node in ast.walk(ast.parse(SOURCES[module])) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(ast.parse(SOURCES[module])) if isinstance(node, ast.Attribute)}
    assert (names | attributes) & {
        "getattr",
        "setattr",
        "delattr",
        "attrgetter",
        "vars",
        "exec",
        "eval",
        "__dict__",
        "__setattr__",
    } == set()


@pytest.mark.parametrize(
    ("module", "body", "wrong"),
    [
        ("replay", "pool._refs[b] = 1", ["touches _refs", "writes _refs"]),
        ("manager", "self.pool._refs[b] += 1", ["touches _refs", "writes _refs"]),
        ("manager", "return self.pool._refs[b]", ["touches _refs"]),
        ("pool", "self._refs[b] = 1", ["writes _refs"]),
        ("pool", "refs = self._refs", ["writes _refs"]),
        ("pool", "helper(self._refs)", ["writes _refs"]),
        ("pool", "return self._empty", ["writes _empty"]),
        ("pool", "empty = self._empty or []", ["writes _empty"]),
        ("pool", "empty = self._empty if b else []", ["writes _empty"]),
        ("pool", "max(self._empty, b).append(1)", ["writes _empty"]),
        ("replay", "seq._batch = None", ["touches _batch", "writes _batch"]),
        ("pool", "drop = self._empty.pop", ["writes _empty"]),
        ("pool", "self._empty.sort()", ["writes _empty"]),
        ("pool", "del self._content[b]", ["writes _content"]),
        ("pool", "a, self._content[b] = 1, 0", ["writes _content"]),
        ("pool", "for self._refs[b] in (1, 2): pass", ["writes _refs"]),
        ("pool", "(empty := self._empty).append(b)", ["writes _empty"]),
        ("pool", "return len(self._empty), self._refs[b], [*self._empty], b in self._content", []),
        ("prefix", "self.index._records[b] = 0", ["touches _records", "writes _records"]),
        ("index", "self._keys[b] = 0", ["writes _keys"]),
        ("index", "return self._records[b]", []),
        ("flight", "self._parked[0].append(b)", ["writes _parked"]),
        ("snapshot", "return seq._num_computed", ["touches _num_computed"]),
        ("manager", "seq._num_computed += 1", ["writes _num_computed"]),
        ("manager", "manager._pins.add(pin)", ["writes _pins"]),
        ("manager", "table = seq._table[:]", []),
    ],
)
def test_what_counts_as_writing(module: str, body: str, wrong: list[str]) -> None:
    source = f"class Some:\n    def thing(self, b, node, pool, seq, pin, manager):\n        {body}\n"
    assert undeclared(module, source) == [f"{module}.Some.thing {what}" for what in wrong]


def test_a_declared_writer_may_write_its_own_field_only() -> None:
    source = "class BlockPool:\n    def share(self, b):\n        self._refs[b] += 1\n        self._content[b] = None\n"
    assert undeclared("pool", source) == ["pool.BlockPool.share writes _content"]
