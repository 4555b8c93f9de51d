"""The allocator's events as vLLM's own, under vLLM's block hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from kvproof.allocator import AllBlocksCleared, BlockStored, Sequence
from kvproof.allocator.events import Event
from kvproof.backend.integrations.vllm import seam
from kvproof.backend.integrations.vllm.blocks import EngineBlocks
from kvproof.backend.integrations.vllm.seam import KVCacheEvent, Request

MEDIUM = "GPU"
"""Where the blocks are, in vLLM's terms; on the CPU platform too."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """The vLLM side of one block's content: its hash, and the request that computed it."""

    hash: Any
    extra_keys: tuple[Any, ...] | None
    lora_id: int | None
    lora_name: str | None
    session_id: str | None


class EventTranslator:
    """Remembers which of vLLM's hashes each identity of ours has, while it is findable.

    A stored event tells of content once, and a removed event when its last copy has gone; vLLM's pool tells of every
    copy. So a consumer that counts copies sees one here.
    """

    def __init__(self, blocks: EngineBlocks, kind: str, sliding_window: int | None) -> None:
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._kind = kind
        self._sliding_window = sliding_window
        self._origins: dict[bytes, _Origin] = {}
        self._events: list[KVCacheEvent] = []

    def catch_up(self) -> None:
        """To be called before more is published: what is gone by now may come again with another origin."""
        self._events += map(self._translated, self._blocks.take_events())

    def published(self, request: Request, seq: Sequence, first: int) -> None:
        """The sequence's computed blocks from `first` on have been published, as this request's."""
        stop = seq.num_computed // self._block_size
        lora = request.lora_request
        media = 0
        for i in range(first, stop):
            extra_keys, media = seam.generate_block_hash_extra_keys(
                request, i * self._block_size, (i + 1) * self._block_size, media
            )
            identity = self._blocks.identity(seq.block_table[i])
            if identity is not None:
                self._origins.setdefault(
                    identity,
                    _Origin(
                        seam.maybe_convert_block_hash(request.block_hashes[i]),
                        extra_keys,
                        lora.adapter_id if lora else None,
                        lora.name if lora else None,
                        request.session_id,
                    ),
                )

    def reused(self, request: Request, seq: Sequence, hits: list[int]) -> None:
        """The request found these blocks, and wants that told."""
        if hits:
            self.catch_up()
            tokens = seq.tokens(0, len(hits) * self._block_size).tolist()
            identities = cast("list[bytes]", [self._blocks.identity(block) for block in hits])  # hits are findable
            self._events.append(self._stored(identities, None, tokens, request.session_id))

    def take(self) -> list[KVCacheEvent]:
        """All since the last call, in order."""
        self.catch_up()
        events, self._events = self._events, []
        return events

    def _translated(self, event: Event) -> KVCacheEvent:
        if isinstance(event, BlockStored):
            session = self._origins[event.blocks[0]].session_id
            return self._stored(list(event.blocks), event.parent, list(event.token_ids), session)
        if isinstance(event, AllBlocksCleared):
            self._origins.clear()
            return seam.AllBlocksCleared()
        hashes = [self._origins.pop(identity).hash for identity in event.blocks]
        return seam.BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=0)

    def _stored(
        self, identities: list[bytes], parent: bytes | None, token_ids: list[int], session_id: str | None
    ) -> KVCacheEvent:
        origins = [self._origins[identity] for identity in identities]
        return seam.BlockStored(
            block_hashes=[origin.hash for origin in origins],
            parent_block_hash=None if parent is None else self._origins[parent].hash,
            token_ids=token_ids,
            block_size=self._block_size,
            lora_id=origins[0].lora_id,
            medium=MEDIUM,
            lora_name=origins[0].lora_name,
            extra_keys=seam.to_event_extra_keys([origin.extra_keys for origin in origins]),
            group_idx=0,
            kv_cache_spec_kind=self._kind,
            kv_cache_spec_sliding_window=self._sliding_window,
            session_id=session_id,
        )
