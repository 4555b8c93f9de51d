"""What must hold of a `BlockManager` after every rule: it does what the executable model does, and memory reads right.

The shadow memory stands for the KV cache. A slot holds the whole prefix its KV was computed from, as real KV does, so
reading a sequence back through its table shows any aliasing, whatever went wrong to cause it (invariant I13).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvproof.allocator import BlockManager, Pin, Sequence
from kvproof.fuzz.machines.router import Router
from kvproof.fuzz.model import ModelManager, ModelSequence, Prefix, clip


@dataclass(eq=False)
class Pair:
    """One sequence twice: as the manager knows it and as the model does."""

    real: Sequence
    model: ModelSequence


class ManagerOracles(RuleBasedStateMachine):
    """The attributes are there once the machine has started.

    pins      with their blocks
    patience  how many steps' events are left to pile up, None for no events; `waited`, how many more may
    """

    manager: BlockManager
    model: ModelManager
    router: Router
    slots: list[Pair | None]
    pins: list[tuple[Pin, list[int]]]
    memory: dict[tuple[int, int], Prefix]
    patience: int | None
    waited: int | None

    @invariant()
    def agrees_with_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        blocks = range(manager.pool.num_reserved, manager.pool.num_blocks)
        assert [manager.pool.refs(block) for block in blocks] == [model.refs[block] for block in blocks]
        assert manager.pool.free_lists() == (model.empty[::-1], model.to_evict())
        assert {block for block in blocks if manager.pool.content(block) is not None} == set(model.holds)
        for pair in filter(None, self.slots):
            real, seq = pair.real, pair.model
            assert list(real.block_table) == seq.table
            assert (real.tokens().tolist(), real.num_computed) == (seq.tokens, seq.computed)
            assert real.num_reserved == seq.reserved
            assert [(item.key, item.start, item.length) for item in real.media] == list(seq.media)
        assert manager.num_used == sum(1 for refs in model.refs if refs)
        counted = {name: value for name, value in asdict(manager.stats()).items() if not name.startswith("num_")}
        assert counted == {name: model.counts[name] for name in counted}

    @invariant()
    def events_tell_what_is_findable(self) -> None:
        if hasattr(self, "manager"):
            if self.patience is None or self.waited is None:
                assert self.manager.take_events() == []
            elif self.waited:
                self.waited -= 1
            else:
                self.read_events()

    def read_events(self) -> None:
        self.waited = self.patience
        self.router.read(self.manager.take_events())
        findable = self.router.findable.values()
        assert sorted(findable, key=repr) == sorted(set(self.model.holds.values()), key=repr)

    @invariant()
    def audit_passes(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        """I13, the content oracle."""
        for pair in filter(None, getattr(self, "slots", ())):
            for i in range(pair.real.num_computed):
                if self.model.window and i <= pair.real.num_computed - self.model.window:
                    continue  # no later token sees it
                entry, offset = divmod(i, self.manager.block_size)
                block = pair.real.block_table[entry]
                source = self.model.copies[block] if block in self.model.copies else block  # noqa: SIM401
                read = self.memory.get((source, offset))
                assert read == pair.model.prefix(i + 1), f"token {i} of {pair.real} reads {read}"

    def snapshot_agrees(self) -> None:
        told, model = json.loads(json.dumps(self.manager.snapshot())), self.model
        for entry in told["blocks"]:
            block = entry["block"]
            assert entry["refs"] == model.refs[block]
            assert (entry["content"] is not None) == (block in model.holds)
            assert entry["state"] in (("published", "active") if model.refs[block] else ("cached", "free"))
        by_content = {model.holds[entry["block"]]: entry["content"] for entry in told["blocks"] if entry["content"]}
        for entry in told["blocks"]:
            if entry["content"]:
                namespace, tokens, media = model.holds[entry["block"]]
                shorter = tokens[: -model.block_size]
                before = namespace, shorter, clip(media, len(shorter))
                assert entry["content"] == by_content[model.holds[entry["block"]]]
                assert entry["parent"] == (by_content[before] if shorter else None)
        assert (told["free"], told["cached"]) == (model.empty[::-1], model.to_evict())
        assert told["pins"] == sorted(blocks for _, blocks in self.pins)
        assert {entry["step"]: entry["parked"] for entry in told["steps"]} == model.flights
        assert {entry["destination"]: entry["source"] for entry in told["copies"]} == model.copies
        for entry, seq in zip(told["sequences"], model.sequences, strict=True):
            assert (entry["tokens"], entry["table"]) == (len(seq.tokens), seq.table)
            assert (entry["computed"], entry["reserved"], entry["step"]) == (seq.computed, seq.reserved, seq.flight)
