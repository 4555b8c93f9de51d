"""A pytest plugin that puts our pool in the place of vLLM's, for vLLM's own tests.

    pytest -p kvproof.backend.integrations.vllm.pool_tests tests/v1/core/test_prefix_caching.py

from a checkout of vLLM at the installed version; the tests are not in its wheel. For tests only: a scheduler gets our
pool by its class, and nothing of vLLM is replaced for that.
"""

from __future__ import annotations

import sys

from kvproof.backend.integrations.vllm import seam
from kvproof.backend.integrations.vllm.pool import BlockPool

for module in list(sys.modules.values()):
    if module is not seam and vars(module).get("BlockPool") is seam.BlockPool:
        module.BlockPool = BlockPool  # type: ignore[attr-defined]
