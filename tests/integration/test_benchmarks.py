"""The benchmarks are for `make bench`. Here each quick one runs once, and the stored baselines are held to them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
BASELINES = {"baseline-quick.json": True, "baseline.json": False}
SLOW = "test_generate.py"  # has a model to load, and takes longer than all the others

PLUGIN = """
import json, pathlib
told = {}

def pytest_collection_finish(session):
    told.update((item.nodeid, {}) for item in session.items)

def pytest_runtest_teardown(item):
    told[item.nodeid] = getattr(item.funcargs.get("benchmark"), "extra_info", {})

def pytest_sessionfinish():
    pathlib.Path("told.json").write_text(json.dumps(told))
"""


def extra_info(folder: Path, *options: str, quick: bool) -> dict[str, dict[str, Any]]:
    """What each benchmark that is there has told, in a pytest with `options`."""
    (folder / "tell.py").write_text(PLUGIN)
    environment = {name: value for name, value in os.environ.items() if name != "KVPROOF_VLLM_PYTHON"} | {
        "KVPROOF_BENCH_QUICK": str(int(quick)),
        "KVPROOF_BENCH_PEERS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-p", "tell", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, dict[str, Any]] = json.loads((folder / "told.json").read_text())
    return told


def stored_ratios(name: str) -> dict[str, dict[str, float]]:
    stored = json.loads((FOLDER / name).read_text())
    assert (stored["schema"], stored["quick"]) == (2, BASELINES[name])
    ratios: dict[str, dict[str, float]] = stored["ratios"]
    return ratios


def names_in(file: Path) -> list[str]:
    """Regular expressions of the ratios that a file can give.

    What is put in when it runs, a peer's name or a size, must be among the file's constants, though it may be any of
    them. So a peer that the file no longer has is noticed, and one that it has elsewhere only is not.
    """
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    constants = {value for value in values if isinstance(value, str)} | {
        f"{value:,}" for value in values if isinstance(value, int)
    }

    def pattern(name: ast.expr) -> str:
        match name:
            case ast.Constant(value=str(text)):
                return re.escape(text)
            case ast.JoinedStr(values=parts):
                return "".join(map(pattern, parts))
        return f"({'|'.join(map(re.escape, constants))})"

    return [
        f"{node.func.attr} {pattern(node.args[0])}"
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("times", "over")
    ]


def unknown_in(ratios: dict[str, dict[str, float]]) -> list[tuple[str, str]]:
    """Those, as (test, name), that no line of their files can give."""
    return [
        (test, name)
        for test, names in ratios.items()
        for name in names
        if not any(re.fullmatch(known, name) for known in names_in(FOLDER / Path(test.partition("::")[0]).name))
    ]


def test_the_quick_benchmarks_give_the_ratios_of_their_baseline(tmp_path: Path) -> None:
    """All of them, and no others, but for those to peers that are absent here."""
    told = extra_info(tmp_path, "--benchmark-disable", f"--ignore={FOLDER / SLOW}", quick=True)
    given = {test: set(info["ratios"]) for test, info in told.items() if "ratios" in info}
    absent = tuple(f"times {peer}" for info in told.values() for peer in info.get("absent", {}))
    stored = {
        test: {name for name in ratios if not name.startswith(absent)}
        for test, ratios in stored_ratios("baseline-quick.json").items()
        if SLOW not in test
    }
    assert given == {test: names for test, names in stored.items() if names}
    assert sum(map(len, given.values())) > 20


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_baseline_names_nothing_that_is_no_more(baseline: str, tmp_path: Path) -> None:
    there = extra_info(tmp_path, "--collect-only", quick=BASELINES[baseline])
    ratios = stored_ratios(baseline)
    assert ratios.keys() - there.keys() == set()
    assert unknown_in(ratios) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("test_attention_decode.py", "times contiguous, of old"),
        ("test_attention_decode.py", "times a peer of old"),
        ("test_allocator.py", "times a_peer_of_old"),
        ("test_allocator.py", "times a_peer_of_old in memory, new"),
        ("test_generate.py", "times transformers, batch of 65"),
        ("test_growth.py", "over 31 running sequences"),
    ],
)
def test_a_ratio_that_is_no_more_is_noticed(file: str, name: str) -> None:
    assert unknown_in({f"tests/benchmarks/{file}::test": {name: 1.0}}) == [(f"tests/benchmarks/{file}::test", name)]
