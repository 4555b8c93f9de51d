"""Checks that any implementation of one of kvproof's interfaces can be held to, its own or somebody else's.

In a test suite:

    from kvproof.fuzz.conformance import attention_checks

    test_attention = attention_checks(MyAttention)

which is one test for each named check; or anywhere, `check_attention_backend(MyAttention)`, which returns a report.
"""

from kvproof.fuzz.conformance.report import Check, Effort, Report, Result
from kvproof.fuzz.conformance.targets import (
    allocator_checks,
    attention_checks,
    check_allocator,
    check_attention_backend,
    check_eviction_policy,
    check_model_runner,
    policy_checks,
    runner_checks,
)

__all__ = [
    "Check",
    "Effort",
    "Report",
    "Result",
    "allocator_checks",
    "attention_checks",
    "check_allocator",
    "check_attention_backend",
    "check_eviction_policy",
    "check_model_runner",
    "policy_checks",
    "runner_checks",
]
