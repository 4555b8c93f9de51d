"""Faults in what routers are told."""

from __future__ import annotations

from kvproof.allocator import PrefixIndex
from kvproof.allocator.events import EventLog
from kvproof.allocator.prefix import PrefixCache
from kvproof.fuzz.planted.fault import Fault

EVENTS_FAULTS = (
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
)
