"""nano-vllm's own block manager and sequences, from the installed package, as the benchmarks drive them.

The package imports CUDA kernels at its root; the two modules are loaded from their files below a root that does not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any


class Unavailable(Exception):
    """Why there is no nano-vllm to compare with."""


def load() -> tuple[type[Any], type[Any]]:
    """nano-vllm's BlockManager and Sequence. Raises `Unavailable`."""
    spec = importlib.util.find_spec("nanovllm")
    if spec is None or spec.submodule_search_locations is None:
        raise Unavailable("nano-vllm is not installed (pip install --no-deps nano-vllm-fork)")
    root = ModuleType("nanovllm")
    root.__path__ = list(spec.submodule_search_locations)
    sys.modules["nanovllm"] = root
    try:
        block_manager = importlib.import_module("nanovllm.engine.block_manager").BlockManager
        sequence = importlib.import_module("nanovllm.engine.sequence").Sequence
    except ImportError as error:
        raise Unavailable(f"nano-vllm's modules can't be loaded: {error}") from None
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
            del sys.modules[name]
    if hasattr(block_manager, "hash_blocks"):
        raise Unavailable("this nano-vllm has the interface of April 2026 and later, with hash_blocks")
    return block_manager, sequence


def version() -> str:
    return importlib.metadata.version("nano-vllm-fork")


class NanoVllm:
    """In the order of its scheduler: can_append and may_append before the step, append_token after it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        block_manager, self.sequence = load()
        self.sequence.block_size = block_size
        self.manager = block_manager(num_blocks, block_size)

    def admit(self, prompt: list[int], sampled: int) -> Any:
        manager = self.manager
        seq = self.sequence(prompt)
        assert manager.can_allocate(seq)
        manager.allocate(seq)
        seq.append_token(sampled)
        return seq

    def rows(self, running: Iterable[Any]) -> Sequence[Any]:
        return list(running)

    def step(self, rows: Sequence[Any], sampled: list[int]) -> None:
        manager = self.manager
        for seq, token in zip(rows, sampled, strict=True):
            assert manager.can_append(seq)
            manager.may_append(seq)
            seq.append_token(token)

    def release(self, seq: Any) -> None:
        self.manager.deallocate(seq)

    def table(self, seq: Any) -> Sequence[int]:
        table: list[int] = seq.block_table
        return table

    def hit_tokens(self, seq: Any) -> int:
        hits: int = seq.num_cached_tokens
        return hits

    def hash_prompt(self, prompt: list[int]) -> int:
        """Hash a prompt's full blocks, as `allocate` does."""
        seq, prefix = self.sequence(prompt), -1
        for i in range(len(prompt) // self.manager.block_size):
            prefix = self.manager.compute_hash(seq.block(i), prefix)
        return prefix
