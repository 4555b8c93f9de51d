"""Mutation testing: which changes are made, what becomes of them, and that the list of exceptions is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvproof.fuzz.equivalent_mutants import EQUIVALENT
from kvproof.fuzz.mutants import Verdict, page_of
from kvproof.fuzz.mutate import mutants

ROOT = Path(__file__).parents[2]

SOURCE = '''
"""A docstring."""
LIMIT = 3


class Counter:
    def add(self, n: int = 1) -> int:
        if n < 0 or self.full:
            raise ValueError(f"{n} is below {0}")
        self.total += n
        self.name = "total"
        return self.total
'''


def test_what_is_changed() -> None:
    assert [mutant.name.removeprefix("counter.") for mutant in mutants("counter", SOURCE)] == [
        "module: LIMIT = 3 -> LIMIT = 4",
        "Counter.add: def add(self, n: int=1) -> int: -> def add(self, n: int=2) -> int:",
        "Counter.add: if n < 0 or self.full: -> if n < 0 and self.full:",
        "Counter.add: if n < 0 or self.full: -> if n <= 0 or self.full:",
        "Counter.add: if n < 0 or self.full: -> if n < 1 or self.full:",
        "Counter.add: raise ValueError(f'{n} is below {0}') -> pass",
        "Counter.add: self.total += n -> self.total -= n",
        "Counter.add: self.total += n -> pass",
        "Counter.add: self.name = 'total' -> pass",
        "Counter.add: return self.total -> return None",
    ]


JUDGE = """\
import sys
from pathlib import Path
import kvproof.fuzz.mutants as tool

names = sys.argv[2:]
made = tool.mutants
tool.mutants = lambda module, source: [mutant for mutant in made(module, source) if mutant.name in names]
tool.EQUIVALENT = {names[2]: "so"}
tool.TESTS = ("policy", "pool")
tool.run_machine = lambda module: True
tool.run_explorer = lambda: module_is_pure()

def module_is_pure():
    from kvproof.allocator import loops
    return loops.compiled is None

judged = {verdict.mutant.name: verdict.killed_by for verdict in tool.run(Path(sys.argv[1]), ["policy", "pool"], 2)}
print(*(judged[name] for name in names), sep="\\n")
"""


def test_a_mutant_is_killed_and_an_equivalent_one_is_not() -> None:
    """In a process that has not imported the allocator. One that is listed is not tried, though it would be killed."""
    names = [
        "policy.LRU.insert: self._length += 1 -> pass",
        "policy.FIFO.insert: self._num_inserted += 1 -> self._num_inserted += 2",
        "policy.LRU.remove: self._length -= 1 -> pass",
        "pool.module: MAX_BLOCKS = 2 ** 28 -> MAX_BLOCKS = 2 ** 29",
    ]
    command = [sys.executable, "-c", JUDGE, str(ROOT), *names]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (ran.stdout.split("\n"), ran.stderr) == (["unit tests", "None", "None", "unit tests", ""], "")


def test_the_list_of_equivalent_mutants_names_mutants_that_there_are() -> None:
    modules = {name.split(".")[0] for name in EQUIVALENT}
    assert modules
    sources = {module: (ROOT / f"allocator/{module}.py").read_text(encoding="utf-8") for module in modules}
    made = {mutant.name for module in modules for mutant in mutants(module, sources[module])}
    assert EQUIVALENT.keys() - made == set()


def test_the_result_file_tells_who_survived_and_why() -> None:
    first, second, third = list(mutants("policy", "a = 1\nb = 2\nc = 3\n"))
    page = page_of([Verdict(second, None), Verdict(first, "unit tests"), Verdict(third, "limits")], 61.7, 2)
    assert "`python -m kvproof.fuzz.mutants --jobs 2`, which took 62 seconds." in page
    assert "| policy | 3 | 1 | 0 | 0 | 0 | 1 | 1 |" in page
    assert "| `policy.module: b = 2 -> b = 3` | 2 | **not explained** |" in page
