"""Faults to plant in our own code, each a failure that some engine really had.

A check that has never failed proves nothing, so every guard we wrote can be broken by name here, and the tests show
that a machine notices.
"""

from __future__ import annotations

from kvproof.fuzz.planted.admission import ADMISSION_FAULTS
from kvproof.fuzz.planted.alone import INDEX_FAULTS, POOL_FAULTS
from kvproof.fuzz.planted.batch import BATCH_FAULTS
from kvproof.fuzz.planted.events import EVENTS_FAULTS
from kvproof.fuzz.planted.eviction import EVICTION_FAULTS
from kvproof.fuzz.planted.fault import Fault
from kvproof.fuzz.planted.holding import HOLDING_FAULTS
from kvproof.fuzz.planted.prefix import PREFIX_FAULTS
from kvproof.fuzz.planted.slots import SLOTS_FAULTS

__all__ = ["FAULTS", "INDEX_FAULTS", "POOL_FAULTS", "Fault"]

FAULTS = (
    *ADMISSION_FAULTS,
    *SLOTS_FAULTS,
    *HOLDING_FAULTS,
    *PREFIX_FAULTS,
    *EVICTION_FAULTS,
    *EVENTS_FAULTS,
    *BATCH_FAULTS,
)
"""For `ManagerMachine`."""
