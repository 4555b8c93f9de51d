"""Faults to plant in our own code, each a failure that some engine really had.

A check that has never failed proves nothing, so every guard we wrote can be broken by name here, and the tests show
that a machine notices. A fault is one replacement in the source of one function, applied in memory.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

from kvproof.allocator import FIFO, BlockManager, BlockPool, PrefixIndex, Sequence, loops
from kvproof.allocator.batch import DecodeBatch
from kvproof.allocator.events import EventLog
from kvproof.allocator.flight import Flights
from kvproof.allocator.guard import Guard
from kvproof.allocator.prefix import PrefixCache


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in the source of `owner.function`."""

    name: str
    owner: type
    function: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in force inside the `with` block. Not for use beside other threads."""
        original = inspect.getattr_static(self.owner, self.function)
        broken = self._broken(original)
        compiled, loops.compiled = loops.compiled, None  # they stand for code that is broken now
        setattr(self.owner, self.function, broken)
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)
            loops.compiled = compiled

    def _broken(self, original: FunctionType) -> FunctionType:
        source = textwrap.dedent(inspect.getsource(original))
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {source.count(self.old)} times in {self.function}")
        scope: dict[str, FunctionType] = {}
        exec("from __future__ import annotations\n" + source.replace(self.old, self.new), original.__globals__, scope)
        return scope[self.function]


FAULTS = (
    Fault(
        "hash alone decides",
        PrefixIndex,
        "find",
        "if self._records[place + _PARENT] == parent and self._key(node) == key:",
        "if True:",
        "a collision serves another sequence's KV",
    ),
    Fault(
        "parent not verified",
        PrefixIndex,
        "find",
        "self._records[place + _PARENT] == parent and ",
        "",
        "own tokens match, the ancestry does not (vllm GHSA-rm76-4mrf-v9r8)",
    ),
    Fault(
        "tokens not verified",
        PrefixIndex,
        "find",
        " and self._key(node) == key",
        "",
        "a collision among the children of one parent",
    ),
    Fault(
        "index outlives the block",
        PrefixCache,
        "_forget",
        "self.index.remove(block, node)",
        "()",
        "an evicted block is still in the map (nano-vllm#163, vllm#4761)",
    ),
    Fault(
        "orphans stay cached",
        PrefixCache,
        "_forget",
        "self.pool.withdraw(orphan)",
        "pass",
        "a parent is evicted while its child stays cached (TensorRT-LLM#3735)",
    ),
    Fault(
        "published before it is written",
        BlockManager,
        "admit",
        "self._admitted[seq] = None",
        "self._admitted[seq] = None\n"
        "        first, stop = len(quote.hits), seq._num_reserved // self.block_size\n"
        "        stop > first and (self._prefixes.prepare(seq, first, stop), self._prefixes.publish(seq, first, stop))",
        "a request hits a block that nobody has written yet (vllm#29387, nano-vllm#208)",
    ),
    Fault(
        "namespaces share",
        PrefixIndex,
        "root",
        "self._roots.get(namespace, NONE)",
        "next(iter(self._roots.values()), NONE)",
        "one tenant hits what another computed (vllm#17045)",
    ),
    Fault(
        "revived hits cost nothing",
        BlockManager,
        "_quote",
        "num_new_blocks + num_revived",
        "num_new_blocks",
        "the check forgets that a free hit leaves the free list (vllm#11565)",
    ),
    Fault(
        "exact fit refused",
        BlockManager,
        "_quote",
        "spare <= self.pool.num_free",
        "spare < self.pool.num_free",
        "admission and allocation count differently (sglang#5081)",
    ),
    Fault(
        "hit evicted for its successor",
        BlockManager,
        "_take_after",
        "for block in hits:",
        "[self.pool.release(b) for b in self.pool.take(num_new_blocks)]\n        for block in hits:",
        "blocks are taken before the hits are held (vllm#37076)",
    ),
    Fault(
        "nothing left to compute",
        BlockManager,
        "_hits",
        "(len(seq) - 1) // self.block_size",
        "len(seq) // self.block_size",
        "a prompt of whole blocks, all cached, has no token to compute (vllm#11186, nano-vllm#114)",
    ),
    Fault(
        "chain restarts after a hit",
        PrefixCache,
        "_hashes",
        "hashes[-1] if hashes else",
        "hashes[-1] if len(hashes) > seq._num_cached // self.block_size else",
        "hashing starts from the root again behind a cached prefix (vllm#12415)",
    ),
    Fault(
        "lifetime not declared",
        BlockManager,
        "_quote",
        "if self._blocks_for(lifetime) > self.num_blocks:",
        "if self._blocks_for(len(seq)) > self.num_blocks:",
        "the only running sequence needs one block more than there are (nano-vllm#274)",
    ),
    Fault(
        "one block at most per reserve",
        BlockManager,
        "_reserve",
        "self.pool.take(num_new_blocks)",
        "self.pool.take(min(num_new_blocks, 1))",
        "several tokens at once cross more than one boundary (sglang#7130)",
    ),
    Fault(
        "boundary by remainder",
        BlockManager,
        "_reserve",
        "self._blocks_for(target) - len(seq._table) + copy",
        "int(target % self.block_size == 1)",
        "block size 1 never has remainder 1 (nano-vllm)",
    ),
    Fault(
        "refused reserve keeps its slots",
        BlockManager,
        "_reserve",
        "return False",
        "seq._num_reserved = target; return False",
        "a refusal is not atomic (nano-vllm)",
    ),
    Fault(
        "duplicate freed, table kept",
        BlockManager,
        "_merge",
        "seq._table[entry] = keeper",
        "pass",
        "the freed duplicate is still named by the table (mini-sglang#142)",
    ),
    Fault(
        "live duplicate lost",
        BlockManager,
        "_publish",
        "self._prefixes.publish_duplicate(seq._table[entry], node)",
        "pass",
        "the newer copy can't be found when the older is evicted (nano-vllm#219)",
    ),
    Fault(
        "head released before tail",
        BlockManager,
        "release",
        "reversed(self._real(seq._table))",
        "self._real(seq._table)",
        "a parent is evicted before its child",
    ),
    Fault(
        "second release accepted",
        BlockManager,
        "release",
        "self._admitted_here(seq)\n"
        "    if seq._batch is not None:\n"
        "        seq._batch._remove(seq)\n"
        "    del self._admitted[seq]",
        "self._admitted.pop(seq, None)",
        "an abort and a late output both free (vllm#33377)",
    ),
    Fault(
        "release forgets a reference",
        BlockPool,
        "release",
        "if refs == 1:",
        "refs = 1\n    if True:",
        "a shared block is freed under its other owner",
    ),
    Fault(
        "cached hit left on the free list",
        BlockPool,
        "share",
        "self._cached.remove(block)",
        "pass",
        "a revived block is handed out again (nano-vllm 9fa256a)",
    ),
    Fault(
        "contentless blocks last",
        BlockPool,
        "take",
        "clock = self.clock - len(taken)",
        "[self._evict() for _ in range(min(n, len(self._cached)))]\n    clock = self.clock - len(taken)",
        "cached blocks are evicted while useless ones lie free (vllm#42656)",
    ),
    Fault(
        "most recently used first",
        BlockPool,
        "_evict",
        "self._cached.pop()",
        "max(self._cached, key=list(self._cached).index); self._cached.remove(block)",
        "eviction takes the block that was freed last (transformers)",
    ),
    Fault(
        "extended by half",
        Sequence,
        "extend",
        "self._tokens.extend(token_array(tokens))",
        "[self._tokens.extend(token_array([token])) for token in tokens]",
        "a bad token is refused after good ones were added",
    ),
    Fault(
        "fork forgets the references",
        BlockManager,
        "fork",
        "self.pool.share_all(self._real(seq._table))",
        "pass",
        "two sequences on one reference: the first release frees the other's blocks",
    ),
    Fault(
        "fork with reserved slots",
        BlockManager,
        "fork",
        "if seq._num_reserved != seq._num_computed:",
        "if False:",
        "both owners would write the same slots",
    ),
    Fault(
        "shared tail written in place",
        BlockManager,
        "_reserve",
        "copy = tail is not None and self.pool.refs(tail) > 1",
        "copy = False",
        "no copy on write",
    ),
    Fault(
        "copy ordered the wrong way",
        BlockManager,
        "_reserve",
        "self._copies[fresh[0]] = self._copies.get(tail, tail)",
        "self._copies[tail] = fresh[0]",
        "source and destination exchanged",
    ),
    Fault(
        "copy of a block that waits for its own",
        BlockManager,
        "_reserve",
        "self._copies.get(tail, tail)",
        "tail",
        "a second copy is taken before the first is made; found by the model checker, not by us",
    ),
    Fault(
        "copy appended",
        BlockManager,
        "_reserve",
        "table[entry] = fresh[0]",
        "table.append(fresh[0])",
        "copy on write grows the table instead of replacing the shared block (vllm c128c2ed03)",
    ),
    Fault(
        "copy keeps its source",
        BlockManager,
        "_reserve",
        "self._flights.drop(seq, (tail,))",
        "pass",
        "the old tail keeps a reference that no table explains: a leak",
    ),
    Fault(
        "copy not counted",
        BlockManager,
        "_reserve",
        "- len(seq._table) + copy",
        "- len(seq._table)",
        "the check forgets the block that the copy needs",
    ),
    Fault(
        "published tail written in place",
        BlockManager,
        "_reserve",
        "self._prefixes.withdraw(tail)",
        "pass",
        "truncated into a cached block, then other tokens are appended (vllm#49377)",
    ),
    Fault(
        "truncation loses the surplus",
        BlockManager,
        "_keep_slots",
        "self._flights.drop(seq, reversed(self._real(dropped)))",
        "pass",
        "blocks of rejected drafts leak",
    ),
    Fault(
        "truncation keeps the hashes",
        BlockManager,
        "truncate",
        ", seq._hashes[length // self.block_size :]",
        "",
        "the new tokens are filed under the old ones",
    ),
    Fault(
        "lookahead past the longest",
        BlockManager,
        "reserve",
        "min(seq._num_computed + n + lookahead, limit)",
        "seq._num_computed + n + lookahead",
        "slots past the longest sequence (vllm#16370)",
    ),
    Fault(
        "reserve adds up",
        BlockManager,
        "reserve",
        "min(seq._num_computed + n + lookahead, limit)",
        "min(seq._num_reserved + n + lookahead, limit)",
        "an append that is repeated takes slots twice (nano-vllm)",
    ),
    Fault(
        "pin holds nothing",
        BlockManager,
        "pin",
        "self.pool.share_all(pin.blocks)",
        "pass",
        "a pinned block is evicted, and unpinned below zero (LMCache#1130)",
    ),
    Fault(
        "unpinned twice",
        BlockManager,
        "unpin",
        "self._pins.remove(pin)",
        "pass",
        "a second unpin frees what another owner holds (LMCache#2954)",
    ),
    Fault(
        "released in flight",
        Flights,
        "drop",
        "if parked is None:",
        "if True:",
        "blocks of a running step are handed out (vllm#47728)",
    ),
    Fault(
        "parked for good",
        Flights,
        "retire",
        "self._pool.release(block)",
        "pass",
        "what a step held is never given back",
    ),
    Fault(
        "retired out of order",
        Flights,
        "retire",
        "step != oldest",
        "step not in self._parked",
        "a later step says that an earlier one is done",
    ),
    Fault(
        "media ignored",
        Sequence,
        "key",
        " + media_in(self.media, start, stop) if self.media else key",
        "",
        "equal placeholders, other image (vllm#12603)",
    ),
    Fault(
        "media without their place",
        BlockManager,
        "sequence",
        "checked_media(media)",
        "tuple(MediaItem(m.key, 0, 1) for m in media)",
        "the same image at another offset (vllm#36708)",
    ),
    Fault(
        "window keeps everything",
        BlockManager,
        "_first_visible",
        "max(0, num_computed - window + 1)",
        "0 * window",
        "blocks that no token sees are never given back",
    ),
    Fault(
        "window off by one",
        BlockManager,
        "_first_visible",
        "num_computed - window + 1",
        "num_computed - window + 2",
        "the oldest visible token loses its block",
    ),
    Fault(
        "window keeps the reference",
        BlockManager,
        "_leave_window",
        "self._flights.drop(seq, left)",
        "pass",
        "the table forgets a block that still counts a reference",
    ),
    Fault(
        "watermark ignored",
        BlockManager,
        "_quote",
        "num_revived + spare",
        "num_revived",
        "admission fills the pool to the brim and is preempted at once",
    ),
    Fault(
        "watermark blocks the only request",
        BlockManager,
        "_quote",
        "self.watermark if self._admitted else 0",
        "self.watermark",
        "nobody runs, and still it does not fit",
    ),
    Fault(
        "reset while in use",
        BlockManager,
        "reset_prefix_cache",
        "if self.num_used:",
        "if False:",
        "old content is found again when the running sequences end",
    ),
    Fault(
        "null block handed out",
        BlockPool,
        "__init__",
        "range(num_blocks - 1, num_reserved - 1, -1)",
        "range(num_blocks - 1, -1, -1)",
        "padding writes where a sequence reads (sglang#32477)",
    ),
    Fault(
        "a hit makes a block young again",
        BlockPool,
        "release",
        "self._published[block])",
        "self.clock)",
        "first in, first out becomes least recently used",
    ),
    Fault(
        "new content is as old as the block's last",
        BlockPool,
        "publish",
        "self._published[block] = self.clock",
        "self._published[block] = self._published[block] or self.clock",
        "FIFO evicts what has just been computed",
    ),
    Fault(
        "parents first among equals",
        FIFO,
        "insert",
        "(published, self._num_inserted, block)",
        "(published, -self._num_inserted, block)",
        "a prompt loses its head, and everything with it",
    ),
    Fault(
        "hits counted at the question",
        BlockManager,
        "can_admit",
        "return self._quote(seq, limit).answer",
        "quote = self._quote(seq, limit)\n"
        "    self._counters.tokens_hit += len(quote.hits) * self.block_size\n"
        "    return quote.answer",
        "a request that waits is counted again each step, and the hit rate passes 1",
    ),
    Fault(
        "a preempted request counts twice",
        BlockManager,
        "_count_admission",
        "seq._was_admitted = True",
        "pass",
        "under pressure the hit rate goes up, because everybody finds what he has lost",
    ),
    Fault(
        "orphans not counted as evicted",
        PrefixCache,
        "_evicted",
        "(block, *self._forget(block, node))",
        "(block, self._forget(block, node))[:1]",
        "more is lost than the figures say",
    ),
    Fault(
        "reset counts as eviction",
        PrefixCache,
        "clear",
        "self.counters.evictions, self.counters.residency = counted",
        "pass",
        "a reset looks like a pool that is too small",
    ),
    Fault(
        "a duplicate is stored twice",
        PrefixCache,
        "publish_duplicate",
        "self.index.carry(block, node)",
        "self.index.carry(block, node)\n"
        "    view = self.index.node(node)\n"
        "    self.events is None or self.events.stored(view, view.parent)",
        "a router counts two copies and sees one removed (vllm's test_kv_events_contract)",
    ),
    Fault(
        "orphans are not told of",
        PrefixIndex,
        "remove",
        "self._forget(dead)",
        "told, self._events = self._events, self._events if dead == node else None\n"
        "        self._forget(dead)\n"
        "        self._events = told",
        "a router keeps sending requests to what can't be found any more",
    ),
    Fault(
        "a removal is told with the first copy",
        PrefixIndex,
        "remove",
        "left.remove(block)",
        "left.remove(block)\n        self._events is None or self._events.removed(Node(self, node))",
        "one of two copies is evicted, and the router forgets both",
    ),
    Fault(
        "a run of events crosses another",
        EventLog,
        "stored",
        " or (self._stored and self._stored[-1] != parent)",
        "",
        "blocks are told below a parent that is not theirs",
    ),
    Fault(
        "removed and stored in the wrong order",
        EventLog,
        "stored",
        "self._removed or ",
        "",
        "content that went and came back is told to be gone",
    ),
    Fault(
        "identity without its prefix",
        EventLog,
        "stored",
        "block_identity(self.identity(parent), node.tokens)",
        'block_identity(b"", node.tokens)',
        "equal blocks of different prefixes are one to the router",
    ),
    Fault(
        "identity without its namespace",
        EventLog,
        "identity",
        "root_identity(node.namespace, ",
        "root_identity(Namespace(), ",
        "a router sends one tenant where another's prefix is (vllm#17045)",
    ),
    Fault(
        "reset tells of nothing",
        EventLog,
        "cleared",
        "self._events.append(AllBlocksCleared())",
        "pass",
        "a router remembers what was computed by other weights",
    ),
    Fault(
        "a second thread is let in",
        Guard,
        "check_thread",
        "if thread is not owner:",
        "if False:",
        "a server thread aborts a request while the engine thread runs it",
    ),
    Fault(
        "snapshot takes the copies",
        BlockManager,
        "snapshot",
        "return snapshot(self)",
        "told = snapshot(self)\n    self._copies.clear()\n    return told",
        "looking at a manager changes it",
    ),
    Fault(
        "another row's tokens",
        DecodeBatch,
        "_settle",
        "seq._row ::",
        "0 ::",
        "sampled tokens go to the wrong sequence",
    ),
    Fault(
        "a row moves with its log behind it",
        DecodeBatch,
        "_remove",
        "self._settle(last)",
        "pass",
        "the last row takes another's place, and reads that one's tokens",
    ),
    Fault(
        "log written over what is owed",
        DecodeBatch,
        "commit",
        "self._num_steps % self._log_steps * self.capacity",
        "0",
        "tokens that nobody has looked at yet are lost",
    ),
    Fault(
        "a row falls behind the log",
        DecodeBatch,
        "_schedule",
        ", self._log_steps)",
        ")",
        "a sequence with large blocks gets tokens of later steps",
    ),
    Fault(
        "a row steps without a slot",
        DecodeBatch,
        "commit",
        "if self._starved:",
        "if False:",
        "KV is written past the table's end, into somebody else's block",
    ),
    Fault(
        "window forgotten in a batch",
        DecodeBatch,
        "_schedule",
        "if window is not None:",
        "if False:",
        "blocks leave the window late",
    ),
    Fault(
        "block tables of a batch miss a merge",
        DecodeBatch,
        "_publish_row",
        "self._tables[seq._row * self._num_columns + merge.entry] = merge.new",
        "pass",
        "attention reads a block that was given back (mini-sglang#142)",
    ),
    Fault(
        "block end missed in a batch",
        DecodeBatch,
        "_schedule",
        "size - seq._num_computed % size, ",
        "size, ",
        "slots that were reserved ahead hide that a block is full",
    ),
    Fault(
        "slots ahead end inside a block",
        DecodeBatch,
        "add",
        "max(seq._num_computed + 1, seq._num_reserved)",
        "seq._num_computed + 1",
        "a whole block is added behind a half-filled one; found in review, not by us",
    ),
    Fault(
        "slots kept on leaving a batch",
        BlockManager,
        "_keep_slots",
        "seq._num_reserved = num_reserved",
        "pass",
        "the table does not cover what is reserved",
    ),
)

POOL_FAULTS = (
    Fault(
        "block released at zero",
        BlockPool,
        "release",
        "if refs == 0:",
        "if False:",
        "a double free: the count goes negative, the block is queued twice (vllm#42571)",
    ),
    Fault(
        "free block shared",
        BlockPool,
        "share",
        "if not self._content[block]:\n            raise",
        "if False:\n            raise",
        "a reference to a block that is still on the free list",
    ),
    Fault(
        "published twice",
        BlockPool,
        "publish",
        " or self._content[block]",
        "",
        "a findable block gets other content under those who read it",
    ),
    Fault(
        "unreferenced block published",
        BlockPool,
        "publish",
        "self.refs(block) == 0 or ",
        "",
        "a block on the free list becomes findable",
    ),
    Fault(
        "negative block is the last",
        BlockPool,
        "refs",
        " <= block < self.num_blocks:",
        " <= abs(block) < self.num_blocks:",
        "slot -1 used as an index hits the last slot (sglang#35351)",
    ),
    Fault(
        "take is not atomic",
        BlockPool,
        "take",
        "if n > len(taken) + self.num_free:",
        "if self.num_free == 0 < n:",
        "the third pop fails and two blocks stay taken (nano-vllm)",
    ),
)
"""Guards that the manager never runs into: for `PoolMachine`."""

INDEX_FAULTS = (
    Fault(
        "uid reused",
        PrefixIndex,
        "_new",
        "self._last_number += 1",
        "self._last_number = len(list(self.nodes())) + 1",
        "an identity has a second life (nano-vllm#163)",
    ),
    Fault(
        "bucket dropped with its first node",
        PrefixIndex,
        "_forget",
        "self._buckets[bucket] = after",
        "self._buckets[bucket] = 0",
        "what collided with an evicted block can't be found any more",
    ),
    Fault(
        "namespaces kept for ever",
        PrefixIndex,
        "_close_gap",
        "del self._roots[self._namespaces.pop(parent)]\n            self._free(parent & _PLACE)",
        "pass",
        "every salt that was ever seen stays in memory",
    ),
)
"""For `IndexMachine`."""
