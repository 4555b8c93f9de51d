"""Mutants that behave as the original does, by the reason: whoever doubts one can check it there and then."""

from __future__ import annotations

_LINKS = "self._links = self._links + array('i', bytes(self._links.itemsize * (missing + 2 * (place // 2))))"
_REBUILDS = "if len(self._heap) > 2 * len(self._entries) + 16:"
_MORE = "more = max(min(size // 4, 1024), n)"
_RECORDS = "self._records = array('Q', bytes(8 * _WORDS))"
_ROOM = "self._records.frombytes(bytes(8 * _WORDS * more))"
_SPREADS = "self._spread(2 ** (2 * (size + more) - 1).bit_length())"
_OF_NODE = "node = self._records[place + _NODE]"
_NODES = "nodes = (self._records[(entry & _LOW) + _NODE] for entry in self._lookup if entry)"
_CHILDREN = "children.append(self._records[child + _NODE])"

_AHEAD = "hashes = self._hashes(seq, i + 1 if i < len(seq._hashes) else min(2 * i + 1, limit))"

_RESERVE = "if type(n) is not int or not 0 <= n <= limit - seq._num_computed:"
_COMMIT = "if type(n) is not int or not 0 <= n <= seq._num_reserved - computed or n > len(seq._tokens) - computed:"
_APPEND = "if type(token) is int and 0 <= token <= MAX_TOKEN_ID and (self._batch is None):"
_SERVED = "for seq, block in zip(served, manager.pool.take(len(served)), strict=True):"
_FIT = "width, num_columns = (self._num_columns, num_blocks + num_blocks // 2)"
_BEFORE = "node = self.pool.content(before) if before >= self.pool.num_reserved else None"

_BY_REASON = {
    "how much room for growth is added: any amount that makes the places that are asked for exist will do": (
        "policy.LRU.insert: missing = 2 * (place + 1) - len(self._links) -> "
        "missing = 3 * (place + 1) - len(self._links)",
        "policy.LRU.insert: missing = 2 * (place + 1) - len(self._links) -> "
        "missing = 2 * (place + 2) - len(self._links)",
        "policy.LRU.insert: if missing > 0: -> if missing >= 0:",
        f"policy.LRU.insert: {_LINKS} -> {_LINKS.replace('+ 2 *', '+ 3 *')}",
        f"policy.LRU.insert: {_LINKS} -> {_LINKS.replace('place // 2', 'place * 2')}",
        f"policy.LRU.insert: {_LINKS} -> {_LINKS.replace('place // 2', 'place // 3')}",
        f"index.PrefixIndex.__init__: {_RECORDS} -> {_RECORDS.replace('8', '9')}",
        "index.PrefixIndex._new: self.make_room(1) -> self.make_room(2)",
        "index.PrefixIndex.make_room: if n <= len(self._free_places): -> if n < len(self._free_places):",
        f"index.PrefixIndex.make_room: {_MORE} -> {_MORE.replace('4, ', '5, ')}",
        f"index.PrefixIndex.make_room: {_MORE} -> {_MORE.replace('1024', '1025')}",
        f"index.PrefixIndex.make_room: {_ROOM} -> {_ROOM.replace('8', '9')}",
        "batch.DecodeBatch.commit: manager.index.make_room(2 * len(rows)) -> manager.index.make_room(3 * len(rows))",
        f"batch.DecodeBatch._fit: {_FIT} -> {_FIT.replace('// 2', '// 3')}",
    ),
    "how many steps of tokens a batch keeps at most: any number will do": (
        "batch.DecodeBatch: max_log_steps = 64 -> max_log_steps = 65",
    ),
    "numbers that are compared with each other only: where they start and how far apart they are is all one": (
        "policy.FIFO.__init__: self._num_inserted = 0 -> self._num_inserted = 1",
        "policy.FIFO.insert: self._num_inserted += 1 -> self._num_inserted += 2",
        "pool.BlockPool.__init__: self.clock = 0 -> self.clock = 1",
        "index.PrefixIndex.restart: self._last_number = 0 -> self._last_number = 1",
        "batch.DecodeBatch.__init__: self._num_steps = 0 -> self._num_steps = 1",
    ),
    "when the heap is rebuilt from the entries: before and after, the same entries come out in the same order": (
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('>', '>=')}",
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('+', '-')}",
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('2 *', '3 *')}",
        f"policy.FIFO.insert: {_REBUILDS} -> {_REBUILDS.replace('16', '17')}",
    ),
    "how many blocks are hashed ahead: the hash of block `i` is there in any case, and hashes are kept": (
        f"prefix.PrefixCache.find: {_AHEAD} -> hashes = self._hashes(seq, min(2 * i + 1, limit) "
        "if i < len(seq._hashes) else i + 1)",
        f"prefix.PrefixCache.find: {_AHEAD} -> {_AHEAD.replace('<', '<=')}",
        "prefix.PrefixCache.find: i + 1 -> i - 1",
        "prefix.PrefixCache.find: min(2 * i + 1, limit) -> min(3 * i + 1, limit)",
        "prefix.PrefixCache.find: min(2 * i + 1, limit) -> min(2 * i + 2, limit)",
    ),
    "`_NODE` is 0": (
        f"index.PrefixIndex.find: {_OF_NODE} -> {_OF_NODE.replace('+', '-')}",
        f"index.PrefixIndex.nodes: {_NODES} -> {_NODES.replace('+', '-')}",
        f"index.PrefixIndex._children: {_CHILDREN} -> {_CHILDREN.replace('+', '-')}",
    ),
    "the hash of a root, which is in no bucket": (
        "index.PrefixIndex.plant: root = self._new(NONE, NONE, 0) -> root = self._new(NONE, NONE, 1)",
    ),
    "links come in pairs: one alone is never missing": ("policy.LRU.insert: if missing > 0: -> if missing > 1:",),
    "set anew when a batch takes the sequence, and not looked at before": (
        "sequence.Sequence.__init__: self._row = self._settled_at = self._due = 0 -> "
        "self._row = self._settled_at = self._due = 1",
    ),
    "an empty rest of the key is kept, and put behind the key": (
        "index.PrefixIndex.add: if len(key) > size: -> if len(key) >= size:",
    ),
    "makes a hash table as large as there is": (
        "index.PrefixIndex.make_room: if 2 * (size + more) > len(self._lookup): -> "
        "if 2 * (size + more) >= len(self._lookup):",
        "index.PrefixIndex.make_room: if 2 * (size + more) > len(self._lookup): -> "
        "if 3 * (size + more) > len(self._lookup):",
    ),
    "an odd number from 3 up has as many bits as the even one before it": (
        f"index.PrefixIndex.make_room: {_SPREADS} -> {_SPREADS.replace('- 1', '- 2')}",
    ),
    "goes around the other way, and finds the entry as well": (
        "index.PrefixIndex._forget: gap = gap + 1 & mask -> gap = gap - 1 & mask",
    ),
    "leads to a second check, which decides": (
        f"manager.BlockManager.reserve: {_RESERVE} -> {_RESERVE.replace('0 <=', '0 <')}",
        f"manager.BlockManager.reserve: {_RESERVE} -> {_RESERVE.replace('0 <=', '1 <=')}",
        f"manager.BlockManager.commit: {_COMMIT} -> {_COMMIT.replace('0 <=', '0 <')}",
        f"manager.BlockManager.commit: {_COMMIT} -> {_COMMIT.replace('0 <=', '1 <=')}",
        f"manager.BlockManager.commit: {_COMMIT} -> {_COMMIT.replace('n > len', 'n >= len')}",
        f"sequence.Sequence.append: {_APPEND} -> {_APPEND.replace('0 <=', '0 <')}",
        f"sequence.Sequence.append: {_APPEND} -> {_APPEND.replace('0 <=', '1 <=')}",
        "pool.BlockPool.content: if not self.num_reserved <= block < self.num_blocks: -> "
        "if not self.num_reserved < block < self.num_blocks:",
    ),
    "runs on big-endian machines only": (
        "events.EventLog._stored_event: token_ids.byteswap() -> pass",
        "sequence.little_endian: tokens.byteswap() -> pass",
    ),
    "nothing else is looked at when the answer is no": (
        "manager.BlockManager._quote: return _Quote(Admission.NEVER, [], 0, 0) -> "
        "return _Quote(Admission.NEVER, [], 1, 0)",
        "manager.BlockManager._quote: return _Quote(Admission.NEVER, [], 0, 0) -> "
        "return _Quote(Admission.NEVER, [], 0, 1)",
    ),
    "`take` returns as many blocks as it is asked for": (
        f"batch.DecodeBatch.reserve: {_SERVED} -> {_SERVED.replace('True', 'False')}",
    ),
    "the search finds the node of the block before too, only slower": (
        f"prefix.PrefixCache._node_before: {_BEFORE} -> {_BEFORE.replace('>=', '>')}",
    ),
    "Python does what the compiled loop has left": (
        "prefix.PrefixCache._hashes: loops.compiled.hash_run(self.hash_block, seq, stop, self.block_size) -> pass",
    ),
    "only its truth is looked at": ("sequence._is_token_id: return False -> return None",),
    "equal numbers have returned before": (
        "compat.BlockManager.may_append: if num_tokens < num_written or not self._is_unchanged(seq, entry): -> "
        "if num_tokens <= num_written or not self._is_unchanged(seq, entry):",
    ),
}

EQUIVALENT = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""The reason by the mutant's name."""
