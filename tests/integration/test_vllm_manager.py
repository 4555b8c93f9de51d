"""vLLM's schedulers on our block manager and on our pool, beside vLLM's own, in the interpreter that has vLLM.

Importing vLLM takes seconds, so everything runs in one process: the state machines, and the cases of
`kvproof.fuzz.machines.vllm_scenarios`.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

CASES = [
    "preempted_before_it_ran",
    "refused_by_name",
    "blocks_are_given_back_later",
    "events_are_vllms",
    "a_free_hit_costs_a_block",
    "what_finishes_is_found",
    "a_salt_is_no_adapter",
    "a_session_goes_on",
    "common_prefix",
    "pool_refuses_a_double_free",
    "pool_keeps_what_is_read",
    "pool_comes_first_or_not_at_all",
    "pool_answers_as_vllms",
    "vllms_tests_get_our_pool",
    "VllmManagerMachine",
    "VllmWindowMachine",
    "VllmPoolMachine",
    "BlocksMachine",
]


@pytest.fixture(scope="module")
def found(vllm_python: str) -> dict[str, str | None]:
    """What went wrong with each case."""
    run = subprocess.run(
        [vllm_python, "-m", "kvproof.fuzz.machines.vllm", "--examples", "40"],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CONFIGURE_LOGGING": "0", "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout.startswith("{"), run.stderr[-4000:]
    answer: dict[str, str | None] = json.loads(run.stdout)
    assert list(answer) == CASES
    return answer


@pytest.mark.parametrize("case", CASES)
def test_on_ours_as_on_vllms_own(found: dict[str, str | None], case: str) -> None:
    assert found[case] is None
