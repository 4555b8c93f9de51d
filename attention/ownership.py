"""The rules block-repeated and block-shared from step to step, at the price of what has changed.

Who names which block is a matter of every entry of every block table, but between two steps most rows gain an entry or
none. So a backend remembers the tables of the last step that was sound, and how often each block is named in them. A
row that begins with its table of then is compared with it, which is as quick as copying it; only the entries it has
gained, and those of rows that came or left, are counted (`ownership.c`).

The verdict is that of `check_ownership`, which looks at everything. It has the word wherever this can't say yes.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from kvproof.attention.native import loaded
from kvproof.attention.plan_rules import Blocks, Ints
from kvproof.attention.spec import CacheSpec

SOURCE = Path(__file__).with_name("ownership.c")


class Tables(ctypes.Structure):
    _fields_ = [("rows", c_int64), ("indptr", c_void_p), ("blocks", c_void_p)]


class Ownership:
    """The block tables of the last sound step, and how often each block is named in them.

    Memory: those tables, and eight bytes for each block of the cache.
    """

    def __init__(self, spec: CacheSpec) -> None:
        # A window takes blocks from the beginnings of tables, which are not what they were then.
        self._library = None if spec.window is not None else load()
        self.spec = spec
        self._block_size = spec.block_size
        self._uses, self._mark = np.zeros((2, spec.num_blocks), dtype=np.int32)
        self._addresses = self._uses.ctypes.data, self._mark.ctypes.data
        self._last = Tables()
        self._held: tuple[Ints, Blocks] | None = None  # what its addresses are of

    def follow(self, kv_indptr: Ints, indices: Blocks, computed: Ints) -> bool:
        """Whether these tables are known to be sound. A copy of them is the next step's to be compared with then.

        All blocks are in range, and each row has one for every token; `computed` are those before the step's own.
        """
        if self._library is None:
            return False
        held = kv_indptr.copy(), indices.copy()
        step = Tables(len(computed), *(array.ctypes.data for array in held))
        kept = np.empty(len(computed), dtype=np.int64)
        # An interruption leaves counts that are too high, and those only cause another look at everything.
        last, self._last = self._last, Tables()
        sound = self._library.kvproof_follow(
            byref(last), byref(step), computed.ctypes.data, self._block_size, *self._addresses, kept.ctypes.data
        )
        if not sound:
            self._uses.fill(0)
            return False
        self._last, self._held = step, held
        return True


@cache
def load() -> ctypes.CDLL | None:
    library = loaded(SOURCE)
    if library is not None:
        library.kvproof_follow.argtypes = [POINTER(Tables), POINTER(Tables), c_void_p, c_int64, *[c_void_p] * 3]
    return library
