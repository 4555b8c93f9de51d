"""Faults to plant in the FlashInfer driver, and whether random batches over the double notice them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from kvproof.attention import CacheSpec
from kvproof.attention.flashinfer_lane import Lane
from kvproof.fuzz.conformance.batches import batches, shapes
from kvproof.fuzz.conformance.driving import assert_right, primed, run_in_steps
from kvproof.fuzz.conformance.report import Check, Effort, on_data
from kvproof.fuzz.flashinfer_double import FlashInferOverDouble
from kvproof.fuzz.flashinfer_kernel import ContractViolation
from kvproof.fuzz.flashinfer_stream import StreamEvent

if TYPE_CHECKING:
    import pytest

EXAMPLES = 200
Plant = Callable[["pytest.MonkeyPatch"], None]


def argument(**changes: Callable[[Any, CacheSpec], Any]) -> Plant:
    """Change or drop (None) what the driver passes to every plan."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        init = Lane.__init__

        def faulty(self: Lane, spec: CacheSpec, *args: Any) -> None:
            init(self, spec, *args)
            for name, change in changes.items():
                self._common[name] = change(self._common[name], spec)
                if self._common[name] is None:
                    del self._common[name]

        patch.setattr(Lane, "__init__", faulty)

    return plant


def wrapper_argument(name: str, change: Callable[[Any], Any]) -> Plant:
    """Change what the driver makes or plans its wrappers with."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plan_wrapper, kernels = Lane._plan_wrapper, FlashInferOverDouble._kernels

        def faulty_plan(self: Lane, wrapper: Any, **step: Any) -> None:
            plan_wrapper(self, wrapper, **{key: change(value) if key == name else value for key, value in step.items()})

        def faulty_kernels(self: FlashInferOverDouble) -> Any:
            made = kernels(self)

            def make(wrapper: Any, **options: Any) -> Any:
                return wrapper(**{key: change(value) if key == name else value for key, value in options.items()})

            return replace(
                made,
                decode=lambda **options: make(made.decode, **options),
                prefill=lambda **options: make(made.prefill, **options),
            )

        patch.setattr(Lane, "_plan_wrapper", faulty_plan)
        patch.setattr(FlashInferOverDouble, "_kernels", faulty_kernels)

    return plant


def nothing_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamEvent, "synchronize", lambda self: None)


def steps_follow_each_other(backend: type[FlashInferOverDouble]) -> Check:
    """The kit's check of that name, for lazy streams as well: results are looked at when the stream has been waited
    for."""
    batch = batches(shapes(backend.capabilities(), "cpu"), padded=bool(backend.graph_sizes))

    def check(data: st.DataObject) -> None:
        spec, rows = (drawn := data.draw(batch, label="batch")).spec, drawn.rows
        it = primed(backend, spec, rows)
        steps = run_in_steps(it, rows, data)
        it.stream.wait()
        for ran in steps:
            assert_right(spec, ran.rows, ran.outputs())

    return on_data("steps follow each other", check)


def assert_noticed(backend: type[FlashInferOverDouble], rule: str) -> None:
    """Within `EXAMPLES`, by that rule of the double, or by wrong numbers if it is empty."""
    error = steps_follow_each_other(backend).run(Effort(EXAMPLES, shrink=False)).error
    assert isinstance(error, AssertionError | TypeError), f"not noticed: {error}"
    assert isinstance(error, ContractViolation) == bool(rule and "missing" not in rule), error
    assert rule in str(error)
