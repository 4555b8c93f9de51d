"""The front of the kit: for each kind of target its checks as a test, and a function that runs them for a report."""

from __future__ import annotations

from collections.abc import Callable

from kvproof.allocator import BlockManager
from kvproof.attention import AttentionBackend
from kvproof.backend.registry import Group, load
from kvproof.backend.runner import ModelRunner
from kvproof.fuzz.conformance import allocator, attention, policy, runner
from kvproof.fuzz.conformance.policy import MakePolicy
from kvproof.fuzz.conformance.report import Check, Effort, Report, as_pytest

Test = Callable[[Check], None]

IN_TESTS = 25
"""Examples of each check in somebody's test suite: seconds in all."""


def attention_checks(
    backend: str | type[AttentionBackend], *, examples: int = IN_TESTS, seed: int = 0, device: str | None = None
) -> Test:
    """A pytest test with one case for each check of an attention backend, given by class or by registered name.

        test_mine = attention_checks(MyAttention)

    It is skipped where the backend is not available. `device` is one that it declares; the CPU by default, if it can.
    """
    backend = _attention(backend)
    return as_pytest(attention.checks(backend, device), Effort(examples, seed), backend.probe)


def check_attention_backend(
    backend: str | type[AttentionBackend],
    *,
    examples: int = 100,
    seed: int = 0,
    device: str | None = None,
    shrink: bool = True,
) -> Report:
    """Run every check of an attention backend. Raises `BackendUnavailable` where it can't run, and registry errors."""
    backend = _attention(backend)
    backend.probe()
    return _report(backend.name, attention.checks(backend, device), Effort(examples, seed, shrink))


def policy_checks(make_policy: MakePolicy, *, examples: int = IN_TESTS, seed: int = 0) -> Test:
    """A pytest test for an eviction policy: a class, or anything that makes a new one when called."""
    return as_pytest(policy.checks(make_policy), Effort(examples, seed))


def check_eviction_policy(
    make_policy: str | MakePolicy, *, examples: int = 100, seed: int = 0, shrink: bool = True
) -> Report:
    """Run every check of an eviction policy, given by what makes one or by its registered name."""
    name = make_policy if isinstance(make_policy, str) else getattr(make_policy, "__name__", repr(make_policy))
    made = load(Group.POLICY, make_policy) if isinstance(make_policy, str) else make_policy
    return _report(name, policy.checks(made), Effort(examples, seed, shrink))


def allocator_checks(make_manager: Callable[..., BlockManager], *, examples: int = IN_TESTS, seed: int = 0) -> Test:
    """A pytest test for an allocator with the interface of `BlockManager`, see `kvproof.fuzz.conformance.allocator`."""
    return as_pytest(allocator.checks(make_manager), Effort(examples, seed))


def check_allocator(
    make_manager: Callable[..., BlockManager], *, examples: int = 100, seed: int = 0, shrink: bool = True
) -> Report:
    """Run every check of an allocator."""
    name = getattr(make_manager, "__name__", repr(make_manager))
    return _report(name, allocator.checks(make_manager), Effort(examples, seed, shrink))


def runner_checks(model: ModelRunner, *, examples: int = IN_TESTS, seed: int = 0) -> Test:
    """A pytest test for a model runner, see `kvproof.fuzz.conformance.runner`."""
    return as_pytest(runner.checks(model), Effort(examples, seed))


def check_model_runner(model: ModelRunner, *, examples: int = 100, seed: int = 0, shrink: bool = True) -> Report:
    """Run every check of a model runner."""
    return _report(model.spec.architecture, runner.checks(model), Effort(examples, seed, shrink))


def _attention(backend: str | type[AttentionBackend]) -> type[AttentionBackend]:
    if isinstance(backend, str):
        loaded: type[AttentionBackend] = load(Group.ATTENTION, backend)
        return loaded
    return backend


def _report(target: str, checks: tuple[Check, ...], effort: Effort) -> Report:
    return Report(target, tuple(check.run(effort) for check in checks))
