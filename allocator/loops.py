"""The switch of the compiled loops: a function that has one asks here whether to use it.

The loops are written in Python, and stand beside the calls of their compiled forms (`_loops.c`), which do as much of
the work as is plain and leave the rest to them. They run alone where the extension was not built, where the environment
has KVPROOF_PURE=1, and while `compiled` is None, which is how a fault planted in the Python code comes into force.
"""

from __future__ import annotations

import os
from types import ModuleType


def _load() -> ModuleType | None:
    if os.environ.get("KVPROOF_PURE") == "1":
        return None
    try:
        from kvproof.allocator import _loops
    except ImportError:
        return None
    return _loops


compiled = _load()
