"""A cache on the CPU lies in large pages where Linux has them."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from kvproof.attention import CacheSpec
from kvproof.attention.large_pages import ask_for_large_pages
from kvproof.attention.torch_paged import TorchAttention

SMAPS, SWITCH = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not SMAPS.exists() or not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="no large pages here"
)


def flags_of(address: int) -> set[str]:
    """What the system was told of the memory there; \"hg\" is the advice to use large pages."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_a_cache_lies_in_large_pages_and_is_zeroed() -> None:
    spec = CacheSpec(
        num_layers=2, num_heads=4, num_kv_heads=4, head_size=64, dtype="float32", num_blocks=512, block_size=16
    )
    cache = TorchAttention(spec).cache
    assert "hg" in flags_of(cache.data_ptr() + cache.numel() * 2)
    assert not cache.any()


def test_large_pages_are_asked_for_where_nobody_has_yet() -> None:
    """A mapping of its own: memory that malloc hands out again keeps the advice of whoever had it before."""
    tensor = torch.frombuffer(mmap.mmap(-1, 1 << 24), dtype=torch.uint8)
    inside = tensor.data_ptr() + tensor.numel() // 2
    assert "hg" not in flags_of(inside)
    ask_for_large_pages(tensor)
    assert "hg" in flags_of(inside)


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 4096 + 5])
def test_small_tensors_are_left_alone(size: int) -> None:
    """An advice that reached past the tensor's own pages would change other people's memory."""
    tensor = torch.arange(size, dtype=torch.uint8)
    ask_for_large_pages(tensor)
    assert torch.equal(tensor, torch.arange(size, dtype=torch.uint8))
