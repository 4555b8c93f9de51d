"""Hypothesis profiles: `ci` is the same run every time, `dev` searches on. HYPOTHESIS_PROFILE chooses another one.

Loaded at import, before a state machine's TestCase takes its settings over from the profile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile("dev", max_examples=100, deadline=None)
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    print_blob=True,
    max_examples=300,
    deadline=None,
    stateful_step_count=50,
)
# For planted faults: the question is whether they are noticed, not by which example. What is drawn follows the
# constants of all modules that are loaded, so any change draws anew: there are examples enough to find each fault.
settings.register_profile(
    "hunt",
    max_examples=3000,
    phases=(Phase.generate,),
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
# For mutants: so is theirs, asked some fifteen hundred times.
settings.register_profile("mutants", settings.get_profile("hunt"), max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(autouse=True)
def _the_same_tensors() -> None:
    """A test begins with the same random tensors in each run. (Examples of Hypothesis go on from there.)"""
    if torch := sys.modules.get("torch"):  # the allocator's tests do without
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors that are small gain nothing from threads, and lose much where other processes hold the cores."""
    import torch  # the allocator's tests do without

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tlc() -> None:
    """Skips where TLC can't run."""
    from kvproof.fuzz.spec.tlc import TLCUnavailable, tlc_command

    try:
        tlc_command()
    except TLCUnavailable as error:
        pytest.skip(str(error))
