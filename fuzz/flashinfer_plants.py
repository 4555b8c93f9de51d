"""Faults to plant in the FlashInfer driver, and whether the random examples notice them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvproof.attention import CacheSpec
from kvproof.attention.flashinfer_lane import Lane
from kvproof.fuzz.flashinfer_double import FlashInferOverDouble
from kvproof.fuzz.flashinfer_examples import run_example
from kvproof.fuzz.flashinfer_kernel import ContractViolation
from kvproof.fuzz.flashinfer_stream import StreamEvent

if TYPE_CHECKING:
    import pytest

EXAMPLES = 200
Plant = Callable[["pytest.MonkeyPatch"], None]
Variant = tuple[type[FlashInferOverDouble], dict[str, Any]]
"""A driver, and the options of its examples."""


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


def first_failure(variants: list[Variant]) -> Exception | None:
    for seed in range(EXAMPLES):
        for backend, options in variants:
            try:
                run_example(backend, seed, **options)
            except (AssertionError, TypeError) as error:
                return error
    return None


def assert_noticed(variants: list[Variant], rule: str) -> None:
    """Within `EXAMPLES`, by that rule of the double, or by wrong numbers if it is empty."""
    failure = first_failure(variants)
    assert failure is not None
    assert isinstance(failure, ContractViolation) == bool(rule and "missing" not in rule), failure
    assert rule in str(failure)
