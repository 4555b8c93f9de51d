"""Our `BlockManager` in the place of vLLM's `KVCacheManager`, behind the methods that vLLM's schedulers call.

When is a block findable? vLLM publishes a block when the scheduler gives it to a request, before any step has written
it: a request of the same step may build on it, because a step writes each layer's KV before it attends. What it gets
wrong is a request that is preempted later in the same scheduling: its blocks stay findable and were never written. Here
a request's full blocks wait until it is certain that their step runs, which is when the scheduler first looks a prefix
up (it has stopped preempting then) or starts the next step. So hits are the same, and what was preempted before it ran
is never found.
"""

from __future__ import annotations

from typing import Any

from kvproof.allocator import Sequence
from kvproof.backend.integrations.vllm.blocks import EngineBlocks
from kvproof.backend.integrations.vllm.errors import UnsupportedFeature
from kvproof.backend.integrations.vllm.events import EventTranslator
from kvproof.backend.integrations.vllm.identity import media_of, namespace_of
from kvproof.backend.integrations.vllm.seam import KVCacheEvent, PrefixCacheStats, Request, RequestStatus
from kvproof.backend.integrations.vllm.supported import Settings
from kvproof.backend.integrations.vllm.views import Blocks, Coordinator, Group, Parked, PoolView

NEVER = 2**62


class _Held:
    """A request that holds blocks.

    due     below so many tokens, drafts and lookahead among them, a step has nothing to do for it
    full    so many tokens fill the next block that is to be published
    """

    __slots__ = ("due", "full", "request", "seq")

    def __init__(self, request: Request, seq: Sequence, full: int) -> None:
        self.request = request
        self.seq = seq
        self.due = 0
        self.full = full


class KVCacheManager:
    """One group of full attention or of a sliding window. `supported.py` refuses the rest before this is made.

    `blocks` is the allocator underneath, for those who look.
    """

    mamba_shared_prefix_checkpoint = False
    mamba_fine_grained_prefix_cache = False  # its name until 0.30

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._block_size = settings.block_size
        self._max_model_len = settings.max_model_len
        self.enable_caching = settings.enable_caching
        self.watermark_blocks = settings.watermark
        self.log_stats = settings.log_stats
        self.blocks = EngineBlocks(
            settings.num_blocks,
            settings.block_size,
            prefix_caching=settings.enable_caching,
            merge_duplicates=False,
            window=settings.window,
            reserve_null_block=True,
            events=settings.events,
        )
        self.block_pool = PoolView(self.blocks)
        self.coordinator = Coordinator((Group(settings.block_size, settings.spec),))
        self.prefix_cache_stats = PrefixCacheStats() if settings.log_stats else None
        self.empty_kv_cache_blocks = self._none = Blocks([])
        self._events = EventTranslator(self.blocks, settings.kind, settings.window) if settings.events else None
        # A window's blocks are given up by what is computed, so that has to be counted even where nothing is findable.
        self._commits = settings.enable_caching or settings.window is not None
        self._held: dict[str, _Held] = {}
        self._waiting: dict[str, Sequence] = {}  # requests that were looked up, or preempted, and hold no blocks
        self._uncommitted: dict[_Held, int] = {}  # tokens that are computed once the step runs, in whole blocks
        self._new_block_ids: list[int] = []

    # ---- a step's allocations

    def new_step_starts(self) -> None:
        """The step before has been sent off."""
        if self._uncommitted:
            self._commit_all()

    def get_computed_blocks(self, request: Request) -> tuple[Blocks, int, int]:
        """The blocks of the request's findable prefix, and its length in tokens. The third is for sparse groups."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self._none, 0, 0
        if self._uncommitted:
            self._commit_all()
        seq = self._sequence(request)
        hits = self.blocks.hits(seq)
        if self._settings.drop_last_hit:
            hits = hits[:-1]
        if self._events is not None and getattr(request, "kv_cache_report_mode", None) == "full":
            self._events.reused(request, seq, hits)
        return Blocks(hits), len(hits) * self._block_size, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Blocks | None:
        """Slots for the request's next tokens and some lookahead: its new blocks, or None, and none is taken."""
        held = self._held.get(request.request_id)
        num_tokens = request.num_computed_tokens + num_new_tokens
        if held is not None:
            if num_tokens + num_lookahead_tokens < held.due:
                return self._none
            return self._grow(held, num_tokens, num_lookahead_tokens)
        if num_external_computed_tokens or delay_cache_blocks or num_encoder_tokens:
            raise UnsupportedFeature("externally computed tokens", "KV connectors and encoders are refused at start")
        num_tokens += num_new_computed_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self._max_model_len)
        hits = [] if new_computed_blocks is None else new_computed_blocks.ids
        spare = reserved_blocks
        if has_scheduled_reqs and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            spare += self.watermark_blocks
        num_blocks = self._blocks_for(num_slots)
        if full_sequence_must_fit:
            num_blocks = max(num_blocks, self._full_sequence(request))
        revived = sum(1 for block in hits if self.blocks.pool.refs(block) == 0)
        if num_blocks - len(hits) + revived + spare > self.blocks.num_free:
            return None
        return self._admit(request, num_tokens, num_slots, num_new_computed_tokens // self._block_size)

    def _admit(self, request: Request, num_tokens: int, num_slots: int, num_hits: int) -> Blocks | None:
        seq = self._sequence(request)
        num_cached = num_hits * self._block_size
        if not self.blocks.admit_after(seq, num_hits, num_slots - num_cached):
            return None
        if seq.num_cached != num_cached or not self._reserve(seq, num_slots):
            self.blocks.release(seq)
            return None
        self.blocks.leave_window(seq, num_cached)
        del self._waiting[request.request_id]
        full = num_cached + self._block_size if self._commits else NEVER
        held = self._held[request.request_id] = _Held(request, seq, full)
        return self._given(held, num_hits, num_tokens)

    def _grow(self, held: _Held, num_tokens: int, num_lookahead: int) -> Blocks | None:
        seq, request = held.seq, held.request
        num_before = len(seq.block_table)
        if self._settings.window is not None:
            num_processed = self._num_processed(request)
            self.cache_blocks(request, num_processed)  # drafts that were accepted
            self._commit(held)
            self.blocks.leave_window(seq, num_processed)
        if not self._reserve(seq, min(num_tokens + num_lookahead, self._max_model_len)):
            return None
        return self._given(held, num_before, num_tokens)

    def _reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Slots up to the end of the block that the last of `num_slots` is in."""
        if num_slots <= seq.num_reserved:
            return True
        return self.blocks.reserve(seq, self._blocks_for(num_slots) * self._block_size - seq.num_computed)

    def _given(self, held: _Held, num_before: int, num_tokens: int) -> Blocks:
        """The blocks after the first `num_before`; the tokens up to `num_tokens` will be computed in them."""
        self.cache_blocks(held.request, num_tokens)
        held.due = min(held.seq.num_reserved + 1, held.full)
        if self._settings.window is not None:
            left = max(0, self._num_processed(held.request) - self._settings.window + 1) // self._block_size
            held.due = min(held.due, (left + 1) * self._block_size + self._settings.window - 1)
        table = held.seq.block_table
        if len(table) == num_before:
            return self._none
        new = table[num_before:].tolist()
        if self._settings.zeroing:
            self._new_block_ids += new
        return Blocks(new)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """The first so many tokens are computed, as far as they are known, once the present step has run."""
        held = self._held[request.request_id]
        if num_computed_tokens < held.full:
            return
        computed = min(num_computed_tokens, request.num_tokens) // self._block_size * self._block_size
        if computed >= held.full:
            self._uncommitted[held] = computed
            held.full = computed + self._block_size

    def _num_processed(self, request: Request) -> int:
        """Tokens whose step has ended: what they needed to read, nobody reads for them again."""
        processed: int = request.num_computed_tokens - request.num_in_flight_tokens
        return max(0, processed)

    def _commit_all(self) -> None:
        for held in list(self._uncommitted):
            self._commit(held)

    def _commit(self, held: _Held) -> None:
        """What was waiting for its step to run becomes findable."""
        computed = self._uncommitted.pop(held, None)
        if computed is None:
            return
        seq = held.seq
        first = seq.num_computed // self._block_size
        self._extend(seq, held.request, computed)
        if self._events is not None:
            self._events.catch_up()
        self.blocks.commit(seq, computed - seq.num_computed)
        if self._events is not None:
            self._events.published(held.request, seq, first)

    # ---- the end of requests

    def free(self, request: Request) -> None:
        """The request has finished, or is preempted: what waited for its step is then never written."""
        held = self._let_go(request)
        if held is not None:
            self.blocks.release(held.seq)

    def pop_blocks_for_free(self, request: Request) -> list[int]:
        """As `free`, but the blocks are handed out again only after `block_pool.free_blocks`, first popped first."""
        held = self._let_go(request)
        if held is None:
            return []
        blocks = held.seq.block_table.tolist()
        step = self.blocks.launch([held.seq])
        self.blocks.release(held.seq)
        return Parked(blocks, step)

    def _let_go(self, request: Request) -> _Held | None:
        held = self._held.pop(request.request_id, None)
        finished = request.is_finished()
        if held is not None:
            if finished:
                self._commit(held)
            else:
                self._uncommitted.pop(held, None)
                self._waiting[request.request_id] = held.seq
        if finished:
            self._waiting.pop(request.request_id, None)
        return held

    def reset_prefix_cache(self) -> bool:
        """Make nothing findable. False, and no change, while any block is in use."""
        if self.blocks.num_used:
            return False
        self.blocks.reset_prefix_cache()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # ---- what others want to know

    def get_blocks(self, request_id: str) -> Blocks:
        held = self._held.get(request_id)
        return self._none if held is None else Blocks(held.seq.block_table.tolist())

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.get_blocks(request_id).ids[:],)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """How many first blocks all requests that hold any share; asked until 0.31."""
        num_common = 0
        for block in self.get_blocks(running_request_id).ids:
            if not block or self.blocks.pool.refs(block) < len(self._held):
                break
            num_common += 1
        return [num_common]

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many of the request's tokens others can find, once its step has run."""
        held = self._held.get(request.request_id)
        if held is None or not self.enable_caching:
            return 0
        return self._uncommitted.get(held, held.seq.num_computed)

    @property
    def usage(self) -> float:
        return self.block_pool.get_usage()

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Counted at admission, and not for a request that did not look."""
        if self.prefix_cache_stats is not None and self.enable_caching and not request.skip_reading_prefix_cache:
            self.prefix_cache_stats.record(request.num_tokens, num_hits, preempted=request.num_preemptions > 0)

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Those since the last call."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        return [] if self._events is None else self._events.take()

    def take_new_block_ids(self) -> list[int]:
        ids, self._new_block_ids = self._new_block_ids, []
        return ids

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """None: a hit is of whole blocks."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """None: there is no Mamba state."""
        return {}

    # ---- helpers

    def _sequence(self, request: Request) -> Sequence:
        """The request as the allocator sees it, with all tokens that are known now."""
        seq = self._waiting.get(request.request_id)
        if seq is None:
            media = media_of(request) if request.mm_features else ()
            seq = self.blocks.sequence(request.all_token_ids[:], namespace=namespace_of(request), media=media)
            self._waiting[request.request_id] = seq
        else:
            self._extend(seq, request, request.num_tokens)
        return seq

    def _extend(self, seq: Sequence, request: Request, num_tokens: int) -> None:
        """The request's first so many tokens are known to the allocator; a session brings media with its new ones."""
        if len(seq) < num_tokens:
            if request.mm_features:
                seq.media = tuple(media_of(request))
            seq.extend(request.all_token_ids[len(seq) : num_tokens])

    def _full_sequence(self, request: Request) -> int:
        """Blocks for all of the request's known tokens, as many as it holds at once."""
        num_blocks = self._blocks_for(min(request.num_tokens, self._max_model_len))
        cap = self._settings.admission_cap
        return num_blocks if cap is None else min(num_blocks, cap)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
