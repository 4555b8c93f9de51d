"""What vLLM's schedulers see of our block manager, in the shapes that they know."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvproof.backend.integrations.vllm.blocks import EngineBlocks
from kvproof.backend.integrations.vllm.errors import UnsupportedFeature


class Blocks:
    """Block ids of the one group, in vLLM's shape."""

    __slots__ = ("ids",)

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Any = None) -> tuple[list[int]] | None:
        return None if allow_none and not self.ids else (self.ids[:],)


class Parked(list[int]):
    """The blocks of a request that was freed while a step may still write them; whole, whichever way it is read."""

    def __init__(self, blocks: list[int], step: int) -> None:
        super().__init__(blocks)
        self.step = step

    def __reversed__(self) -> Parked:  # type: ignore[override]
        return self


class Group(NamedTuple):
    """What vLLM wants to know of a group's manager."""

    block_size: int
    kv_cache_spec: Any


class Coordinator(NamedTuple):
    single_type_managers: tuple[Group]
    enable_partial_hash_hits: bool = False


class _Block(NamedTuple):
    block_id: int


class PoolView:
    """What vLLM's schedulers ask of a manager's pool directly."""

    null_block = _Block(0)

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks

    def free_blocks(self, parked: Parked | list[int]) -> None:
        """The step that may have written these has ended."""
        if isinstance(parked, Parked):
            self._blocks.retire(parked.step)
        elif parked:
            raise UnsupportedFeature("retained copies", "blocks are given back by request only")

    def get_num_free_blocks(self) -> int:
        return self._blocks.num_free

    def get_usage(self) -> float:
        return self._blocks.num_used / self._blocks.num_blocks
