"""The machine in general terms, with what of ours it compiles: on another one, ratios are other ratios.

Its name is nobody's business.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

INSTRUCTIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "AMX": "amx_tile", "NEON": "asimd", "SVE": "sve"}
"""Families that decide how fast a kernel is, by the flag that tells of each."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""Where Linux tells of a core's caches, each in a folder."""


@cache
def this_machine() -> dict[str, Any]:
    """What a baseline says of the machine that it is of, None where it is unknown. Plain JSON.

    A hypervisor may give many processors one name: the cache tells them apart.
    """
    from cpuinfo import get_cpu_info

    from kvproof.allocator import loops

    cpu = get_cpu_info()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    compiler = shutil.which("cc") or shutil.which("gcc")
    return {
        "processor": cpu.get("brand_raw") or platform.machine(),
        "instructions": [family for family, flag in INSTRUCTIONS.items() if flag in cpu.get("flags", ())],
        "KiB of L3 cache": _l3_size(),
        "cores": cores,
        "threads": int(threads) if threads.isdecimal() else cores,
        "system": f"{platform.system()} {platform.machine()}",
        "compiled loops": loops.compiled is not None,
        "compiled kernels": compiler is not None and os.environ.get("KVPROOF_NO_KERNEL") != "1",
    }


def _l3_size() -> int | None:
    """In KiB, the unit in which Linux tells it."""
    try:
        sizes = {
            (folder / "level").read_text().strip(): (folder / "size").read_text() for folder in CACHES.glob("index*")
        }
        return int(sizes["3"].strip().removesuffix("K"))
    except (OSError, KeyError, ValueError):
        return None


def in_words(machine: Mapping[str, Any]) -> str:
    def told(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return f"{'with' if value else 'without'} {name}"
        if isinstance(value, int):
            return f"{value} {name if value != 1 else name.removesuffix('s')}"
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    known = [told(name, value) for name, value in machine.items() if value is not None]
    return ", ".join(filter(None, known))
