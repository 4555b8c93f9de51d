"""Hypothesis profiles: `ci` is the same run every time, `dev` searches on. HYPOTHESIS_PROFILE chooses another one.

Loaded at import, before a state machine's TestCase takes its settings over from the profile.
"""

from __future__ import annotations

import os

from hypothesis import settings

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
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))
