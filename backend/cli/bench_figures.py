"""What a benchmark says beside its own time, in pytest-benchmark's `extra_info`: written by `Figures`, read here.

ratios  by name. "times X" is how many times as good as X we were (as fast, unless it names something else), so that
        more is better; "over X" how many times as long as X we took, so that less is better. X is a peer, a bare limit
        or a smaller size, measured in the same run; what comes after a comma and a space tells ratios to the same X
        apart
aims    for some of the ratios
curves  for the report's plots, see `Curve`
absent  why a peer was not measured, by its name
versions
        of the packages that took part

Everything else in `extra_info` is for people: sizes, versions, absolute figures.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvproof.allocator import InvalidArgument

KINDS = ("times ", "over ")
RESERVED = ("ratios", "aims", "curves", "absent", "versions")
PACKAGES = ("kvproof", "torch", "transformers", "nano-vllm-fork", "hypothesis", "pytest-benchmark")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio of one benchmark, and its aim where it has one."""

    benchmark: str
    name: str
    value: float
    aim: float | None = None

    @property
    def more_is_better(self) -> bool:
        return self.name.startswith("times ")

    @property
    def against(self) -> str:
        return self.name.partition(", ")[0]

    @property
    def detail(self) -> str:
        return self.name.partition(", ")[2]

    @property
    def met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.value >= self.aim if self.more_is_better else self.value <= self.aim

    def worse_than(self, before: float) -> float:
        """How many times as bad as `before` it is: 1 is unchanged, 2 twice as bad, 0.5 twice as good."""
        return before / self.value if self.more_is_better else self.value / before


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot. Curves of the same `chart` are drawn together, whichever benchmarks they are from."""

    chart: str
    line: str
    x: str
    y: str
    points: list[tuple[int, float]]


class Figures:
    """Writes a benchmark's figures. Times of `ours` and of a peer are paired: they were measured turn by turn."""

    def __init__(self, benchmark: Any) -> None:
        self._info: dict[str, Any] = benchmark.extra_info
        self._info["versions"] = versions()

    def times(self, peer: str, theirs: Sequence[float], ours: Sequence[float], *, aim: float | None = None) -> None:
        self._ratio(f"times {peer}", theirs, ours, aim)

    def over(self, limit: str, ours: Sequence[float], limits: Sequence[float], *, aim: float | None = None) -> None:
        self._ratio(f"over {limit}", ours, limits, aim)

    def curve(self, chart: str, line: str, points: Mapping[int, float], *, x: str, y: str) -> None:
        curve = Curve(chart, line, x, y, [(at, round(value, 4)) for at, value in points.items()])
        self._info.setdefault("curves", []).append(asdict(curve))

    def absent(self, peer: str, reason: str) -> None:
        self._info.setdefault("absent", {})[peer] = reason

    def note(self, **figures: Any) -> None:
        self._info.update(figures)

    def show(self) -> None:
        """Print all but the curves, for whoever runs pytest with -s."""
        told = {name: value for name, value in self._info.items() if name != "curves"}
        print("\n" + ", ".join(f"{name} {value}" for name, value in told.items()))

    def _ratio(self, name: str, above: Sequence[float], below: Sequence[float], aim: float | None) -> None:
        value = statistics.median(a / b for a, b in zip(above, below, strict=True))
        self._info.setdefault("ratios", {})[name] = round(value, 3)
        if aim is not None:
            self._info.setdefault("aims", {})[name] = aim


@cache
def versions() -> dict[str, str]:
    """Of Python, and of the packages that take part where they are installed."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def ratios_of(results: Mapping[str, Any]) -> list[Ratio]:
    """All ratios in pytest-benchmark's JSON, in its order. Raises `InvalidArgument` for one that says no direction."""
    ratios = []
    for benchmark, info in _infos(results):
        aims = info.get("aims", {})
        for name, value in info.get("ratios", {}).items():
            if not name.startswith(KINDS) or not value > 0:
                raise InvalidArgument(f"{benchmark}: ratio {name!r} is {value}, must be 'times X' or 'over X', above 0")
            ratios.append(Ratio(benchmark, name, value, aims.get(name)))
    return ratios


def charts_of(results: Mapping[str, Any]) -> dict[str, list[Curve]]:
    """The curves of each chart."""
    charts: dict[str, list[Curve]] = {}
    for _, info in _infos(results):
        for told in info.get("curves", []):
            curve = Curve(**{**told, "points": [(x, y) for x, y in told["points"]]})
            charts.setdefault(curve.chart, []).append(curve)
    return charts


def absent_of(results: Mapping[str, Any]) -> dict[str, str]:
    """The peers that some benchmark had to do without, and why."""
    return {peer: reason for _, info in _infos(results) for peer, reason in info.get("absent", {}).items()}


def notes_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """What is for people in a benchmark's `extra_info`."""
    return {name: value for name, value in info.items() if name not in RESERVED}


def named(benchmark: str) -> str:
    """A benchmark's name without the folders of its file, and without its file where its own name begins with that."""
    path, _, test = benchmark.partition("::")
    file, test = path.rpartition("/")[2].removesuffix(".py").removeprefix("test_"), test.removeprefix("test_")
    return test if test.startswith(file) else f"{file}: {test}" if test else file


def shown(ratio: float) -> str:
    """To three places, and never as a power of ten."""
    return f"{ratio:.3g}" if ratio < 999.5 else f"{ratio:,.0f}"


def _infos(results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    benchmarks: Iterable[Mapping[str, Any]] = results["benchmarks"]
    for benchmark in benchmarks:
        yield benchmark["fullname"], benchmark["extra_info"]
