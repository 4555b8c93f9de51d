"""Has TLC follow recorded runs: the design accepts a run when it does the same in every event.

This binds the code to the design call by call, at scopes that no search exhausts, and checks every invariant in every
state on the way. What TLC starts from is allocator/spec/TraceKV.tla.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, groupby, zip_longest

from kvproof.fuzz.canonical import SequenceState, State
from kvproof.fuzz.explore import HASHES
from kvproof.fuzz.spec.checks import Check
from kvproof.fuzz.spec.scopes import Scope
from kvproof.fuzz.spec.tlc import INVARIANTS, PROPERTIES, configuration, constants_of, failure, run_module, set_of
from kvproof.fuzz.trace import SCOPES, Event, Run, record
from kvproof.fuzz.world import Action

_SATISFIED, _DEADLOCK, _INVARIANT_VIOLATED, _PROPERTY_VIOLATED = 0, 11, 12, 13


@dataclass(frozen=True, slots=True)
class Rejection:
    """Where code and design part: in event `event` of run `run`, both counted from 0. Earlier events of it agree.

    `why` is a part of the state that differs, or says that only one of them refuses the call, or names an invariant.
    """

    run: int
    event: int
    why: str

    def __str__(self) -> str:
        return f"run {self.run}, event {self.event}: {self.why}"


def validate(runs: Iterable[Run], *, design: str | None = None, timeout: float = 600.0) -> Rejection | None:
    """None when the design follows every run to its end.

    `design` replaces the text of PagedKV.tla. Raises `TLCUnavailable`, `TLCFailed`, or `TimeoutError` when the runs of
    one scope take longer than `timeout` seconds.
    """
    runs = list(runs)
    order = sorted(range(len(runs)), key=lambda i: runs[i].scope.name)
    for scope, places in groupby(order, key=lambda i: runs[i].scope):
        members = list(places)
        rejection = _validate(scope, [runs[i] for i in members], design, timeout)
        if rejection is not None:
            return replace(rejection, run=members[rejection.run])
    return None


def some_runs(scope: Scope, count: int, num_events: int) -> list[Run]:
    """Runs with seeds 0 and up, and one hash function after the other: the design knows only the perfect one."""
    return [record(scope, seed, num_events, hash) for seed, hash in zip(range(count), cycle(HASHES.values()))]


def checks(full: bool) -> Iterator[Check]:
    """A part of `python -m kvproof.fuzz.spec`."""
    count, num_events = (32, 80) if full else (8, 40)
    for scope in SCOPES:
        runs = some_runs(scope, count, num_events)
        rejection = validate(runs)
        refused = sum(event.refused for run in runs for event in run.events)
        yield Check(
            what=f"{scope}: {count} runs of {num_events} calls, {refused} of them refused",
            right=rejection is None,
            detail=str(rejection or ""),
            states=count * (num_events + 1),
            transitions=count * num_events,
        )


def _validate(scope: Scope, runs: list[Run], design: str | None, timeout: float) -> Rejection | None:
    texts = {"TraceData.tla": _module(scope, runs), "TraceKV.cfg": _trace_config(scope)}
    if design is not None:
        texts["PagedKV.tla"] = design
    late = f"TLC has not followed the runs at {scope}"
    return _verdict(*run_module("TraceKV", texts, deadlocks=True, timeout=timeout, late=late), runs)


def _verdict(code: int, output: str, runs: list[Run]) -> Rejection | None:
    num_states = sum(len(run.events) + 1 for run in runs)
    if code == _SATISFIED and f" {num_states} distinct states found" in output:
        return None
    places = re.findall(r"^/\\ trace_(?:run|event) = (\d+)$", output, re.M)
    if code not in (_DEADLOCK, _INVARIANT_VIOLATED, _PROPERTY_VIOLATED) or len(places) < 2:
        raise failure(code, output)
    run, following = (int(number) - 1 for number in places[-2:])  # in the last state of the counterexample
    if code != _DEADLOCK:
        return Rejection(run, following - 1, re.findall(r"^Error: (.* is violated)", output, re.M)[0])
    event = runs[run].events[following]
    difference = re.search(r'^"(\w+: design .*)"$', output, re.M)
    why = difference[1] if difference else f"the design {'has' if event.refused else 'refuses'} this call"
    return Rejection(run, following, f"{event.action}: {why}")


# ---- what TLC is given


def _trace_config(scope: Scope) -> str:
    constants = {**constants_of(scope), **{name: name for name in _names(scope)}}
    return configuration(constants, INVARIANTS, PROPERTIES, "CONSTANT Hash <- Perfect", behaviours="Trace")


def _names(scope: Scope) -> list[str]:
    """The sequences, namespaces and pins of `scope`, which are model values."""
    kinds = {"s": scope.num_seqs, "n": scope.num_namespaces, "p": scope.num_pins}
    return [f"{kind}{i}" for kind, count in kinds.items() for i in range(count)]


def _module(scope: Scope, runs: list[Run]) -> str:
    return (
        "---- MODULE TraceData ----\nEXTENDS Invariants\n"
        f"CONSTANTS {', '.join(_names(scope))}\n"
        f"Runs == {_tuple(_tuple(map(_event, run.events)) for run in runs)}\n====\n"
    )


def _event(event: Event) -> str:
    name, refused = f'"{event.action.name}"', str(event.refused).upper()
    return "\n" + _record({"name": name, "with": _with(event.action), "refused": refused, "shows": _shown(event.state)})


def _with(action: Action) -> str:
    """The arguments; sequences and pins, which the code numbers, by their names."""
    kinds = {"Fork": "ss", "Launch": "s" * len(action.args), "Pin": "sp", "Unpin": "p", "Retire": ""}
    named = zip_longest(kinds.get(action.name, "s" if action.args else ""), action.args, fillvalue="")
    return _tuple(f"{kind}{_value(argument)}" for kind, argument in named)


def _shown(state: State) -> str:
    """What `Shown` of TraceKV.tla is for the design."""
    return _record(
        {
            "seq": _graph((f"s{s}", _sequence(seq)) for s, seq in enumerate(state.seqs)),
            "refs": _graph(enumerate(state.refs)),
            "index": set_of(_value((*prefix, blocks)) for prefix, blocks in state.index),
            "free": _value(state.free),
            "lru": _value(state.cached),
            "flights": _value(state.parked),
            "pins": _graph((f"p{p}", blocks) for p, blocks in enumerate(state.pins)),
            "copies": _graph(state.copies),
        }
    )


def _sequence(seq: SequenceState | None) -> str | None:
    if seq is None:
        return None
    return _record({"ns" if name == "namespace" else name: _value(value) for name, value in seq._asdict().items()})


def _value(value: object) -> str:
    return _tuple(map(_value, value)) if isinstance(value, tuple) else str(value)


def _graph(pairs: Iterable[tuple[object, object]]) -> str:
    return set_of(map(_value, pairs))


def _tuple(elements: Iterable[str]) -> str:
    return "<<" + ", ".join(elements) + ">>"


def _record(fields: Mapping[str, str]) -> str:
    return "[" + ", ".join(f"{name} |-> {value}" for name, value in fields.items()) + "]"
