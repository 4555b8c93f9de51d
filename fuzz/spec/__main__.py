"""`python -m kvproof.fuzz.spec` checks the specification at every scope, with hashes that collide, and plants every
fault in it. It takes minutes, writes a Markdown table, and exits 1 when anything is not as recorded."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from kvproof.fuzz.spec.faults import FAULTS, find
from kvproof.fuzz.spec.scopes import SCOPES
from kvproof.fuzz.spec.tlc import HASHES, check


def scope_rows() -> Iterator[tuple[str, bool]]:
    yield "| scope | hash | states | transitions | depth | seconds | violated |", True
    yield "| --- | --- | ---: | ---: | ---: | ---: | --- |", True
    for scope in SCOPES:
        # A hash has nothing to mix up where all tokens are equal and so is the namespace.
        for hash in HASHES if scope.num_tokens * scope.num_namespaces > 1 else HASHES[:1]:
            start = time.monotonic()
            verdict = check(scope, hash=hash)
            row = (scope, hash, *verdict.graph, f"{time.monotonic() - start:.0f}", verdict.violated or "nothing")
            yield _row(*row), verdict.violated is None and verdict.graph == scope.graph


def fault_rows() -> Iterator[tuple[str, bool]]:
    yield "| planted fault | scope | hash | found by | after states | in steps |", True
    yield "| --- | --- | --- | --- | ---: | ---: |", True
    for fault in FAULTS:
        verdict = find(fault)
        row = (fault, fault.scope, fault.hash, verdict.violated, verdict.graph.states, len(verdict.trace) - 1)
        yield _row(*row), verdict.violated == fault.violates


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    all_right = True
    for rows in (scope_rows(), fault_rows()):
        for row, right in rows:
            sys.stdout.write(row + ("" if right else " **not as recorded**") + "\n")
            sys.stdout.flush()
            all_right &= right
        sys.stdout.write("\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
