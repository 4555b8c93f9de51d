"""`kvproof bench` on a folder of benchmarks that takes no time: what it runs, writes, and calls a regression."""

from __future__ import annotations

import json
import platform
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvproof.allocator import InvalidArgument
from kvproof.cli import bench_machine, bench_run, main
from kvproof.cli.bench_compare import Baseline, compare
from kvproof.cli.bench_figures import Figures, Ratio, ratios_of, shown
from kvproof.cli.bench_machine import in_words, this_machine

BENCHMARKS = """
import os
import pytest
from kvproof.cli.bench_figures import Figures

@pytest.mark.parametrize("size", [1, 1000], ids=["one", "many"])
def test_fast(benchmark, size):
    benchmark.pedantic(lambda: None, rounds=3)
    figures = Figures(benchmark)
    figures.times("peer & co", [4.0, 90.0, 8.0], [1.0, 10.0, 2.0], aim=5)
    figures.over("bare <limit>", [3.0], [2.0], aim=2)
    figures.curve("growth", f"line {size}", {1: 2.0, 100: 2.5, 10_000: 3.0}, x="blocks", y="us")
    figures.note(size=size, quick=os.environ["KVPROOF_BENCH_QUICK"])
    if os.environ["KVPROOF_BENCH_PEERS"] == "0":
        figures.absent("peer & co", "not asked for")

def test_skipped(benchmark):
    pytest.skip("no such thing here")
"""
BUSY_AT_FIRST = """
import pathlib
from kvproof.cli.bench_figures import Figures

def test_busy(benchmark):
    benchmark.pedantic(lambda: None, rounds=1)
    began = pathlib.Path(__file__).with_name("began")
    Figures(benchmark).over("limit", [1.1 if began.exists() else 3.0], [1.0])
    began.touch()
"""
FAILING_AGAIN = (
    BUSY_AT_FIRST
    + """
    assert not began.with_name("broken").exists(), "broken meanwhile"
    began.with_name("broken").touch()
"""
)
DYING_AGAIN = FAILING_AGAIN.replace(
    "    assert", "    import os; began.with_name('broken').exists() and os._exit(7)\n    assert"
)
FAILING = """
def test_broken(benchmark):
    assert 1 + 1 == 3, "arithmetic"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "benchmarks"
    made.mkdir()
    (made / "test_fake.py").write_text(BENCHMARKS)
    return made


def is_inside(svg: ET.Element) -> bool:
    """Whether all bars and all points lie in the drawing."""
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    bars = [{name: float(rect.attrib[name]) for name in ("x", "y", "width", "height")} for rect in svg.iter("rect")]
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in svg.iter("circle")]
    points += [(bar["x"], bar["y"]) for bar in bars]
    points += [(bar["x"] + bar["width"], bar["y"] + bar["height"]) for bar in bars]
    return all(0 <= x <= width and 0 <= y <= height for x, y in points)


def bench(*argv: object) -> int:
    try:
        return main(["bench", *map(str, argv)])
    except SystemExit as leave:
        return int(leave.code or 0)


def test_a_run_writes_a_report_and_its_ratios_are_a_baseline(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test, since every run starts a pytest: a report, then the same ratios with noise, then one that regressed."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert bench(folder, "--report", first, "--quick") == 0
    told = capsys.readouterr().out
    assert "fake: fast[many]" in told
    assert "absent: peer & co: not asked for" in told
    assert f"2 benchmarks, 4 ratios, 2 of 4 aims met; report: {first / 'index.html'}" in told
    assert f"not compared: there is no {folder / 'baseline-quick.json'}\n" in told
    benchmarks = json.loads((first / "benchmarks.json").read_text())["benchmarks"]
    assert [(b["extra_info"]["size"], b["extra_info"]["quick"]) for b in benchmarks] == [(1, "1"), (1000, "1")]
    ratios = json.loads((first / "ratios.json").read_text())
    (one, thousand) = ratios["ratios"]
    assert ratios["quick"] is True
    assert ratios["ratios"][one] == {"times peer & co": 4.0, "over bare <limit>": 1.5}

    markdown = (first / "report.md").read_text()
    assert "| fake: fast[one] | times peer & co | 4 | >= 5 | no |" in markdown
    assert "| fake: fast[many] | over bare <limit> | 1.5 | <= 2 | yes |" in markdown
    assert "- fake: skipped: no such thing here" in markdown
    page = (first / "index.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    drawings = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert [len(svg.findall("polyline")) for svg in drawings] == [0, 0, 2]  # both curves in one chart
    assert [len(svg.findall("rect")) for svg in drawings] == [2, 2, 0]
    assert all(is_inside(svg) for svg in drawings)
    assert re.findall(r"<h3>(.*?)</h3>", page) == ["times peer &amp; co", "over bare &lt;limit&gt;"]

    ratios["ratios"][one] = {"times peer & co": 4.9, "over bare <limit>": 1.3}  # 4.9 / 4 = 1.225, 1.5 / 1.3 = 1.154
    ratios["ratios"]["gone"] = {"times peer & co": 9.0, "times nobody": 2.0}
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(ratios))
    assert bench(folder, "--report", second, "--quick", "--compare", baseline, "--json") == 0
    assert json.loads(capsys.readouterr().out)["regressed"] == []
    assert "- gone: times peer & co, times nobody" in (second / "report.md").read_text()

    ratios["ratios"][thousand] = {"times peer & co": 5.1, "over bare <limit>": 0.1}
    baseline.write_text(json.dumps(ratios))
    assert bench(folder, "--report", second, "--quick", "--compare", baseline) == 1
    regressed = [line for line in (second / "report.md").read_text().splitlines() if "REGRESSED" in line]
    assert regressed == [
        "| fake: fast[many] | times peer & co | 4 | >= 5 | no | 5.1 | 1.27 REGRESSED |",
        "| fake: fast[many] | over bare <limit> | 1.5 | <= 2 | yes | 0.1 | 15.00 REGRESSED |",
    ]
    told = capsys.readouterr().out.replace("\n", " ")
    assert "2 of 4 ratios are more than 25% worse, 2 were not measured now" in told


def test_the_baseline_of_the_folder_is_compared_with_where_the_machine_is_like_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored: dict[str, Any] = {
        "schema": 2,
        "quick": True,
        "machine": this_machine(),
        "versions": {"torch": "0.1"},
        "ratios": {},
    }
    report = ("--report", tmp_path / "report", "--quick")
    assert bench(folder, *report) == 0
    (test, _) = json.loads((tmp_path / "report" / "ratios.json").read_text())["ratios"]
    stored["ratios"] = {test: {"times peer & co": 40.0}}
    (folder / "baseline-quick.json").write_text(json.dumps(stored))
    capsys.readouterr()
    assert bench(folder / "test_fake.py", *report) == 1
    told = capsys.readouterr().out
    assert (
        f"compared with {folder / 'baseline-quick.json'}, of torch 0.1: 1 of 1 ratios are more than 25% worse" in told
    )
    assert "REGRESSED" in told

    stored["machine"] = {**this_machine(), "cores": 1_000_000, "instructions": ["MMX"]}
    (folder / "baseline-quick.json").write_text(json.dumps(stored))
    assert bench(folder, *report) == 0
    told = capsys.readouterr().out
    assert "not compared: " in told
    assert "baseline-quick.json is of another machine: it has MMX, 1000000 cores, this one " in told
    assert "before" not in told
    assert told.splitlines()[-2] in (tmp_path / "report" / "report.md").read_text()


def test_a_damaged_baseline_of_the_folder_is_passed_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = folder / "baseline.json"
    stored.write_text('{"schema": 2, "quick": false, "versions": {}, "ratios": {}}')
    assert bench(folder, "--report", tmp_path / "report", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["regressed"] is None
    assert told["compared"] == f"not compared: {stored} is damaged: 'machine' must be an object, it is None"


def test_what_seems_to_have_regressed_is_measured_once_more(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report"
    (folder / "test_busy.py").write_text(BUSY_AT_FIRST)
    (folder / "began").touch()
    assert bench(folder, "--report", report, "--quick") == 0
    (report / "ratios.json").rename(folder / "baseline-quick.json")
    (folder / "began").unlink()
    capsys.readouterr()
    assert bench(folder, "--report", report, "--quick") == 0
    told = capsys.readouterr().out
    assert "0 of 5 ratios are more than 25% worse, 0 were not measured now; 1 benchmark was measured once more" in told
    measured = {
        b["name"]: b["extra_info"]["ratios"] for b in json.loads((report / "benchmarks.json").read_text())["benchmarks"]
    }
    assert measured["test_busy"] == {"over limit": 1.1}
    assert len(measured) == 3


@pytest.mark.parametrize(
    ("code", "others", "reason"),
    [
        (FAILING_AGAIN, True, "AssertionError: broken meanwhile"),
        (FAILING_AGAIN, False, "AssertionError: broken meanwhile"),
        (DYING_AGAIN, False, "pytest ended with 7 and measured nothing (see {report}/pytest.log)"),
    ],
    ids=["beside one that does not fail", "alone", "with the whole process"],
)
def test_the_first_measurement_stands_where_the_second_fails(
    folder: Path, tmp_path: Path, code: str, others: bool, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report"
    (folder / "test_busy.py").write_text(code)
    (folder / "began").touch()
    assert bench(folder, "--report", report) == 0
    ratios = json.loads((report / "ratios.json").read_text())
    busy, fast = (next(test for test in ratios["ratios"] if name in test) for name in ("busy", "fast[one]"))
    ratios["ratios"][busy] = {"over limit": 0.1}
    if others:
        ratios["ratios"][fast] = {"times peer & co": 40.0}
    (folder / "baseline.json").write_text(json.dumps(ratios))
    (folder / "began").unlink()
    (folder / "broken").unlink()
    capsys.readouterr()
    assert bench(folder, "--report", report, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failed"][busy] == reason.format(report=report)
    assert [ratio["value"] for ratio in told["ratios"] if ratio["benchmark"] == busy] == [3.0]
    assert [change["ratio"]["benchmark"] for change in told["regressed"]] == [busy, fast][: 1 + others]
    assert len(json.loads((report / "benchmarks.json").read_text())["benchmarks"]) == 3
    assert "over limit | 3 |" in (report / "report.md").read_text()


def test_the_machine_is_told_in_general_terms() -> None:
    machine = {"processor": "X", "instructions": ["A", "B"], "cores": 2, "threads": 1, "loops": True, "compiler": False}
    assert in_words(machine) == "X, A B, 2 cores, 1 thread, with loops, without compiler"
    assert in_words({"KiB of cache": None, "system": "Y"}) == "Y"
    assert {type(value) for value in this_machine().values()} <= {str, list, int, bool, type(None)}
    assert platform.node() not in json.dumps(this_machine()).split('"')


def test_a_machine_has_the_cache_that_all_its_cores_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uevent").touch()  # as Linux has it, beside the folders
    for index, level, size in ((0, 1, "48K"), (1, 3, "36608K"), (2, 2, "2048K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(f"{level}\n")
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    for caches, known in ((tmp_path, 36_608), (tmp_path / "index0", None)):
        monkeypatch.setattr(bench_machine, "CACHES", caches)
        assert this_machine.__wrapped__()["KiB of L3 cache"] == known


@pytest.mark.parametrize(
    ("compiler", "without", "compiled"),
    [("/bin/cc", "0", True), ("/bin/cc", "1", False), (None, "0", False)],
)
def test_a_machine_has_compiled_kernels_where_they_are_used(
    compiler: str | None, without: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: compiler)
    monkeypatch.setenv("KVPROOF_NO_KERNEL", without)
    assert this_machine.__wrapped__()["compiled kernels"] is compiled


def test_a_benchmark_that_fails_is_told_and_exit_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "test_failing.py").write_text(FAILING)
    assert bench(folder, "--report", tmp_path / "report", "--peers", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [reason for _, reason in report["failed"].items()] == ["AssertionError: arithmetic"]
    assert len(report["ratios"]) == 4
    assert "<h2>Peers that were absent</h2>" not in (tmp_path / "report" / "index.html").read_text()


def test_nothing_measured_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "test_fake.py").write_text("import no_such_module_at_all")
    assert bench(folder, "--report", tmp_path) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "No module named 'no_such_module_at_all'" in told
    assert str(tmp_path / "pytest.log") in told


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("/no/such/folder",), 1, "there is no /no/such/folder"),
        ((".", "--compare", "/no/such.json"), 1, "can't read the baseline /no/such.json"),
        ((".", "--threshold", "0"), 2, "0 must be more than 0"),
        ((".", "--threshold", "much"), 2, "invalid number value: 'much'"),
    ],
)
def test_bad_input_is_one_line(
    argv: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*argv) == code
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert message in told


def test_without_a_checkout_it_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "__file__", str(tmp_path / "site-packages/kvproof/cli/bench_run.py"))
    monkeypatch.chdir(tmp_path)
    assert bench() == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "run this in a checkout of kvproof, after make dev, or name a folder of your own benchmarks" in told


def damaged(field: str, value: Any) -> str:
    """A baseline of a full run with `value` in one of its fields; None stands for no such field."""
    whole = {"schema": 2, "quick": False, "machine": {}, "versions": {}, "ratios": {}, field: value}
    return json.dumps({name: told for name, told in whole.items() if told is not None})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("{", "can't read the baseline"),
        ('{"benchmarks": []}', "is no baseline: give the ratios.json"),
        ('{"schema": 1, "quick": false, "ratios": {}}', "is no baseline: give the ratios.json"),
        ("[]", "is no baseline: give the ratios.json"),
        (damaged("quick", None), "old.json is damaged: 'quick' must be true or false, it is None"),
        (damaged("quick", 0), "'quick' must be true or false, it is 0"),
        (damaged("machine", None), "'machine' must be an object, it is None"),
        (damaged("machine", "X"), "'machine' must be an object, it is 'X'"),
        (damaged("versions", ["torch"]), "'versions' must be an object of strings, it is ['torch']"),
        (damaged("versions", {"torch": 2}), "'versions' must be an object of strings"),
        (damaged("ratios", None), "'ratios' must be an object of objects of numbers above 0"),
        (damaged("ratios", {"b": 1.5}), "'ratios' must be an object of objects of numbers above 0"),
        (damaged("ratios", {"b": {"times X": "2"}}), "'ratios' must be an object of objects of numbers above 0"),
        (damaged("ratios", {"b": {"times X": 0}}), "'ratios' must be an object of objects of numbers above 0"),
        (damaged("ratios", {"b": {"times X": float("nan")}}), "'ratios' must be an object of objects of numbers above"),
        (damaged("quick", True), "is of a run with --quick, whose sizes differ"),
        (damaged("machine", {}), "is of another machine: it has no more, this one"),
        (damaged("machine", {"instructions": [1]}), "is of another machine: it has 1, this one"),
    ],
)
def test_what_is_no_baseline_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, stored: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.json"
    file.write_text(stored)
    assert bench(folder, "--compare", file, "--report", tmp_path / "report") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("name", "value", "before", "regressed"),
    [
        ("times vLLM", 8.0, 10.0, False),  # a quarter worse is no more than a quarter
        ("times vLLM", 7.99, 10.0, True),
        ("times vLLM", 20.0, 10.0, False),
        ("over bare read", 2.5, 2.0, False),
        ("over bare read", 2.51, 2.0, True),
        ("over bare read", 1.0, 2.0, False),
    ],
)
def test_which_way_is_worse(name: str, value: float, before: float, regressed: bool) -> None:
    baseline = Baseline(Path("old"), {}, {"b": {name: before}})
    (change,) = compare([Ratio("b", name, value)], baseline, threshold=0.25).changes
    assert change.regressed is regressed


@pytest.mark.parametrize(
    ("ratio", "told"), [(0.1247, "0.125"), (2.0, "2"), (999.4, "999"), (999.6, "1,000"), (12_345.6, "12,346")]
)
def test_a_ratio_is_shown_without_powers_of_ten(ratio: float, told: str) -> None:
    assert shown(ratio) == told


def test_a_ratio_says_which_way_is_better() -> None:
    def results(info: dict[str, Any]) -> dict[str, Any]:
        return {"benchmarks": [{"fullname": "b", "extra_info": info}]}

    benchmark = SimpleNamespace(extra_info={})
    Figures(benchmark).times("x", [1.0, 9.0], [1.0, 3.0])  # the median of the turns' ratios, 1 and 3
    assert ratios_of(results(benchmark.extra_info)) == [Ratio("b", "times x", 2.0)]
    for ratios in ({"faster than x": 2.0}, {"times x": 0.0}):
        with pytest.raises(InvalidArgument, match="must be 'times X' or 'over X', above 0"):
            ratios_of(results({"ratios": ratios}))
