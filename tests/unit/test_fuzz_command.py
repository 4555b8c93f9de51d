"""`kvproof fuzz`: the same seed finds the same, a fault is found and written down, the report says what was done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from kvproof.cli import main
from kvproof.fuzz.campaign import Campaign, Result
from kvproof.fuzz.catalogue import catalogue, fault_named
from kvproof.fuzz.detection import page_of as rates_page
from kvproof.fuzz.detection import rates
from kvproof.fuzz.hunt import hunt
from kvproof.fuzz.page import page_of
from kvproof.fuzz.plan import Plan
from kvproof.fuzz.regression import failures_of
from kvproof.fuzz.report import report_of

POOL = Plan(machines=("pool",), examples=120, seed=5)
RELEASED_AT_ZERO = [
    "state = PoolMachine()",
    "state.start(num_blocks=1, num_reserved=0, policy='lru')",
    "state.release(block=0)",
    "state.teardown()",
]
"""The shortest example that shows the fault "block released at zero"."""


def report(plan: Plan) -> Any:
    return report_of(plan, Campaign(plan).run(), [], "")


def found(plan: Plan) -> Any:
    return report(plan)["found"]


def call(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; from kvproof.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", script, *argv], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_same_seed_finds_the_same_in_any_number_of_processes() -> None:
    measured = replace(POOL, packages=("kvproof.allocator",))
    one, two = report(measured), report(replace(measured, jobs=2))
    assert (two["found"], two["coverage"]) == (one["found"], one["coverage"])
    first = one["found"]
    assert found(POOL) == first  # measuring changes nothing
    assert found(replace(POOL, seed=6)) != first
    (machine,) = first["machines"]
    assert (machine["rounds"], machine["error"]) == (2, None)
    assert machine["examples"] - machine["invalid"] == 120
    assert machine["rules"].keys() == {
        "start", "take", "share", "release", "publish", "withdraw", "ask_for_no_block", "evict_all",
    }  # fmt: skip
    assert machine["rules"]["start"] == machine["examples"]
    assert machine["invariants"] == {"agrees_with_model": sum(machine["rules"].values())}
    assert machine["growth"][-1] == (machine["examples"], machine["states"])


@pytest.fixture(scope="module")
def broken() -> tuple[Plan, Result]:
    plan = replace(POOL, examples=1000, fault="block released at zero")
    return plan, Campaign(plan).run()


def test_a_planted_fault_is_shrunk_and_stops_its_machine(broken: tuple[Plan, Result]) -> None:
    _, result = broken
    (machine,) = result.machines
    assert result.failed
    assert machine.error == "AssertionError: release(0,) was accepted"
    assert [line for line in machine.program if "agrees" not in line] == RELEASED_AT_ZERO
    assert machine.examples < 1000


def test_the_regression_file_fails_with_the_fault_and_passes_without(
    broken: tuple[Plan, Result], tmp_path: Path
) -> None:
    (failure,) = failures_of(*broken, tmp_path, "kvproof fuzz pool")
    assert (failure.found_by, failure.replay) == ("machine pool", f"python -m pytest {failure.file}")
    assert not failure.confirmed  # the fault is not in force when the file is run alone
    test = only_test(Path(failure.file))
    test()
    with fault_named("block released at zero").fault.planted(), pytest.raises(AssertionError, match="was accepted"):
        test()


def test_what_the_explorer_finds_becomes_a_file_too(tmp_path: Path) -> None:
    plan = Plan(machines=(), scopes=("orphans",), examples=1, fault="cached hit left on the free list")
    result = Campaign(plan).run()
    assert result.failed
    (failure,) = failures_of(plan, result, tmp_path, "kvproof fuzz manager")
    assert failure.error == "InvariantViolation: I2: block 0 is listed as cached and is published"
    assert len(failure.steps) == 4
    test = only_test(Path(failure.file))
    test()
    fault = fault_named("cached hit left on the free list").fault
    with fault.planted(), pytest.raises(Exception, match="I2: block 0 is listed as cached"):
        test()


def only_test(file: Path) -> Any:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    (test,) = [value for name, value in vars(module).items() if name.startswith("test_")]
    return test


LEAKY = '''\
class Leaky:
    """A pool that counts right and never gives a block back that was shared."""

    def __init__(self, num_blocks):
        self.free, self.counts = list(range(num_blocks)), {}

    @property
    def num_free(self):
        return len(self.free)

    def take(self, n):
        if not 0 <= n <= len(self.free):
            raise ValueError(n)
        taken = [self.free.pop() for _ in range(n)]
        self.counts |= dict.fromkeys(taken, 1)
        self.shared = set()
        return taken

    def share(self, block):
        self.counts[block] += 1
        self.shared.add(block)

    def give_back(self, blocks):
        if any(blocks.count(block) > self.counts.get(block, 0) for block in blocks):
            raise ValueError(blocks)
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block] {condition}:
                self.free.append(block)

    def refs(self, block):
        return self.counts.get(block, 0)
'''


def test_a_failure_of_foreign_code_is_exit_1_and_a_file_that_fails_until_it_is_mended(tmp_path: Path) -> None:
    code = tmp_path / "leaky.py"
    code.write_text(LEAKY.replace("{condition}", "and block not in self.shared"))
    argv = ["fuzz", "allocator", "--target", "leaky:Leaky", "--examples", "100", "--json"]
    ran = call(argv, tmp_path)
    assert (ran.returncode, ran.stderr) == (1, "")
    told = json.loads(ran.stdout)
    (failure,) = told["found"]["failures"]
    assert failure["error"] == "Violation: free-count: 0 blocks are said to be free, 1 are"
    assert failure["confirmed"] is True
    assert told == json.loads((tmp_path / "fuzz-report/report.json").read_text())
    command = [sys.executable, *failure["replay"].split()[1:], "-q", "-p", "no:cacheprovider"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    code.write_text(LEAKY.replace("{condition}", ""))
    os.utime(code, (1, 1))  # the compiled file is told apart by the source's time
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_the_report_and_its_page() -> None:
    plan = Plan(machines=("pool", "index"), scopes=("orphans",), examples=20, packages=("kvproof.allocator",))
    told = report(plan)
    assert json.loads(json.dumps(told)).keys() == {
        "schema", "command", "plan", "environment", "found", "coverage", "timing",
    }  # fmt: skip
    orphans = told["found"]["explorer"][0]
    assert orphans.pop("covers")
    assert orphans == {
        "scope": "orphans", "hash": "Perfect", "states": 1164, "known_states": 1164, "transitions": 9120,
        "known_transitions": 9120, "complete": True, "violation": None,
    }  # fmt: skip
    assert told["found"]["machines"][0].keys() == {
        "machine", "rounds", "examples", "invalid", "states", "growth", "rules", "invariants", "events", "error",
    }  # fmt: skip
    assert told["coverage"]["files"].keys() == {"allocator/index.py", "allocator/policy.py", "allocator/pool.py"}
    total = told["coverage"]["total"]
    assert 0 < total["covered_branches"] < total["branches"]
    assert 0 < total["covered_lines"] < total["lines"]
    slowest = told["timing"]["machines"]["pool"]["slowest"]
    assert len(slowest) == 5
    assert slowest[0]["steps"][0].startswith("start(")
    page = page_of(told)
    assert page.count("<svg") == 8  # states, growth, rules and invariants of two machines, events of one, branches
    assert "1,164 of 1,164" in page
    assert re.findall(r"(?:src|href)=|//|@import|<script|<link", page) == []  # nothing beside it


def test_what_time_did_not_suffice_for_is_told() -> None:
    plan = Plan(machines=(), scopes=("orphans", "forks"), seconds=0.4)
    orphans, forks = found(plan)["explorer"]
    assert 1 < orphans["states"] < orphans["known_states"]
    assert (orphans["complete"], forks["complete"], forks["states"]) == (False, False, 0)


def test_a_corpus_is_tried_first(tmp_path: Path) -> None:
    plan = replace(POOL, examples=1000, fault="block released at zero", corpus=str(tmp_path))
    assert Campaign(plan).run().machines[0].rounds > 1
    again = Campaign(plan).run().machines[0]
    assert (again.rounds, again.error) == (1, "AssertionError: release(0,) was accepted")
    mended = Campaign(replace(plan, fault=None, examples=10)).run().machines[0]
    assert (mended.rounds, mended.error) == (2, None)


def test_a_hunt_tells_who_found_what() -> None:
    names = ["namespaces share", "published twice", "written before the copy is made", "page size 1 is not there"]
    both, pool, explorer, kit = hunt(names, seed=0, examples=3000)
    assert (both.scope, both.finder, pool.scope, explorer.finder) == ("namespaces", "manager", None, None)
    assert (kit.scope, kit.finder) == (None, "conformance")
    for find in (both, pool, explorer, kit):
        assert find.found
        for sighting in filter(None, (find.examples, find.explorer)):
            assert sighting.error is not None
            assert 0 < sighting.amount < 3000


def test_a_fault_that_nobody_notices_is_missed_and_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One example is not enough."""
    assert main(["fuzz", "--planted", "free block shared", "--examples", "1", "--json"]) == 1
    (find,) = json.loads(capsys.readouterr().out)
    assert (find["found"], find["examples"]["error"]) == (False, None)


def test_the_catalogue_knows_every_fault_once() -> None:
    assert len(catalogue()) >= 40
    for name, planted in catalogue().items():
        assert planted.fault.name == name
        assert planted.finder or planted.hunt


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--time", "soon"], 2, "'soon' is no time: say 90, 60s, 10m or 1h"),
        (["--time", "0s"], 2, "0s must be more than 0"),
        (["--time", "1s", "--examples", "1"], 2, "not allowed with argument"),
        (["nothing"], 2, "invalid choice: 'nothing'"),
        (["--known", "counts"], 1, "--known needs --target"),
        (["--planted", "no such"], 1, "no fault is called 'no such'"),
        (["--target", "json"], 1, "'json' is not module:Class"),
        (["--target", "no.such:Class"], 1, "no.such:Class can't be imported: No module named 'no'"),
        (["--target", "json:JSONDecoder"], 1, "json:JSONDecoder has none of the known interfaces"),
        (
            ["--target", "kvproof.allocator:BlockPool", "--known", "fits"],
            1,
            "no check is called 'fits', there are: dis",
        ),
        (["attention", "--backend", "torch", "--time", "1s"], 1, "by --examples, not by --time"),
        (["--seeds", "3"], 1, "--seeds needs --planted"),
        (["--backend", "torch"], 1, "--backend needs the target attention"),
        (["attention", "--backend", "nope"], 1, "unknown attention backend 'nope'"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], code: int, message: str) -> None:
    try:
        got = main(["fuzz", *argv])
    except SystemExit as leave:
        got = int(leave.code or 0)
    err = capsys.readouterr().err
    assert (got, err.count("\n")) == (code, 1)
    assert message in err


needs_atheris = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")


@needs_atheris
def test_atheris_finds_a_fault_which_is_shrunk_and_kept_like_any_other(tmp_path: Path) -> None:
    plan = replace(POOL, engine="atheris", examples=3000, corpus=str(tmp_path), fault="block released at zero")
    result = Campaign(plan).run()
    (machine,) = result.machines
    assert machine.error == "AssertionError: release(0,) was accepted"
    assert [line for line in machine.program if "agrees" not in line] == RELEASED_AT_ZERO
    assert len(list((tmp_path / "pool/inputs").iterdir())) > 10  # what reached something new
    again = Campaign(replace(plan, engine="hypothesis", examples=10)).run().machines[0]
    assert (again.rounds, again.error) == (1, machine.error)


@needs_atheris
def test_atheris_runs_as_many_examples_as_it_is_told_or_as_long() -> None:
    plan = replace(POOL, engine="atheris", examples=300)
    (machine,) = Campaign(plan).run().machines
    assert (machine.examples, machine.rounds, machine.error) == (300, 1, None)
    assert machine.rules["take"] > 0
    assert 0 < machine.states < machine.rules.total()
    timed = Campaign(replace(plan, machines=("pool", "index"), examples=None, seconds=3.0)).run()
    assert all(machine.examples > 10 for machine in timed.machines)
    assert timed.seconds < 30


def test_without_atheris_the_engine_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvproof.cli.fuzz.find_spec", lambda name: None if name == "atheris" else find_spec(name))
    assert main(["fuzz", "pool", "--engine", "atheris", "--examples", "1"]) == 1
    assert capsys.readouterr().err == ("kvproof fuzz: error: this needs atheris: pip install 'kvproof[fuzz-atheris]'\n")


def test_each_machine_has_a_corpus_of_its_own(tmp_path: Path) -> None:
    """Hypothesis would take them for one test, and forget what does not fail in the other."""
    plan = replace(
        POOL, machines=("index", "pool"), examples=1000, fault="block released at zero", corpus=str(tmp_path)
    )
    Campaign(plan).run()
    assert Campaign(replace(plan, machines=("index",), examples=1)).run().machines[0].error is None
    assert Campaign(plan).run().machines[1].rounds == 1


def test_rates_tell_from_how_many_seeds_a_fault_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fuzz", "--planted", "take is not atomic", "--seeds", "5", "--report", str(tmp_path)]
    assert main([*argv, "--json"]) == 0
    (rate,) = json.loads(capsys.readouterr().out)
    amounts = sorted(sighting["amount"] for sighting in rate["sightings"])
    assert (rate["found"], len(amounts), rate["median"]) == (5, 5, amounts[2])
    assert len(set(amounts)) > 1  # each seed draws others
    page = (tmp_path / "detection.md").read_text()
    assert "`kvproof fuzz --planted 'take is not atomic' --seeds 5`" in page
    assert f"| take is not atomic | pool | 5 of 5 | {amounts[2]} | {amounts[4]} |" in page
    assert main([*argv, "--examples", "1"]) == 1
    assert "| take is not atomic | pool | 0 of 5 | 1 | 1 |" in capsys.readouterr().out


def test_a_fault_that_is_found_at_once_is_not_looked_for_from_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproof.fuzz.detection.FEW", 2)
    (quick,) = rates(["take is not atomic"], seeds=4, examples=3000)
    (slow,) = rates(["take is not atomic"], seeds=4, examples=10)
    assert (len(quick.sightings), len(slow.sightings)) == (2, 4)


def test_rates_tell_what_the_explorer_finds() -> None:
    both, alone = rates(["exact fit refused", "take is not atomic"], seeds=2, examples=3000)
    assert both.explorer is not None
    assert both.explorer.found
    assert both.scope in rates_page([both], planted="all", seeds=2, examples=3000)
    assert alone.explorer is None
    missed = replace(both, explorer=replace(both.explorer, error=None))
    assert (both.suffices, missed.suffices) == (True, False)
    assert f"| {both.scope} | MISSED |" in rates_page([missed], planted="all", seeds=2, examples=3000)
