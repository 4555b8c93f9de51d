"""Puts other people's classes behind the protocols of `kvproof.fuzz.protocol`, and picks the machine for each."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hypothesis.stateful import RuleBasedStateMachine, StateMachineMeta

from kvproof.allocator import Admission, InvalidArgument, KvproofError
from kvproof.allocator.sequence import Sequence as OurSequence
from kvproof.fuzz.machines.blocks import BlocksMachine
from kvproof.fuzz.machines.sequences import SequencesMachine
from kvproof.fuzz.nano import NanoSequence
from kvproof.fuzz.protocol import ALLOCATOR_CHECKS, POOL_CHECKS


class UnusableTarget(KvproofError):
    """A target can't be imported, or has none of the interfaces that are known."""


class OurPool:
    """`kvproof.allocator.BlockPool` as a `Pool`."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    @property
    def num_free(self) -> int:
        return int(self.pool.num_free)

    def take(self, n: int) -> Sequence[int]:
        blocks: list[int] = self.pool.take(n)
        return blocks

    def share(self, block: int) -> None:
        self.pool.share(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """The pool releases one block at a time, so more of one than it has owners are refused here."""
        for block, n in Counter(blocks).items():
            if n > max(1, self.pool.refs(block)):
                raise InvalidArgument(f"block {block} is given back {n} times, it has {self.pool.refs(block)} owners")
        for block in blocks:
            self.pool.release(block)

    def refs(self, block: int) -> int:
        return int(self.pool.refs(block))


class OurManager:
    """`kvproof.allocator.BlockManager` as an `Allocator`."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    @property
    def num_free(self) -> int:
        return int(self.manager.num_free)

    def allocate(self, tokens: list[int]) -> OurSequence | None:
        seq: OurSequence = self.manager.sequence(tokens)
        return seq if self.manager.admit(seq) is Admission.NOW else None

    def num_cached(self, seq: OurSequence) -> int:
        return seq.num_cached

    def written(self, seq: OurSequence) -> None:
        self.manager.commit(seq, len(seq) - seq.num_computed)

    def append(self, seq: OurSequence, tokens: list[int]) -> bool:
        if not self.manager.reserve(seq, len(tokens)):
            return False
        seq.extend(tokens)
        return True

    def table(self, seq: OurSequence) -> Sequence[int]:
        return seq.block_table

    def free(self, seq: OurSequence) -> None:
        self.manager.release(seq)


class Nano:
    """A block manager with nano-vllm's interface as an `Allocator`. That KV is written, the interface never says."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    @property
    def num_free(self) -> int:
        return len(self.manager.free_block_ids)

    def allocate(self, tokens: list[int]) -> NanoSequence | None:
        seq = NanoSequence(tokens, self.manager.block_size)
        if not self.manager.can_allocate(seq):
            return None
        self.manager.allocate(seq)
        return seq

    def num_cached(self, seq: NanoSequence) -> int:
        return seq.num_cached_tokens

    def written(self, seq: NanoSequence) -> None:
        pass

    def append(self, seq: NanoSequence, tokens: list[int]) -> bool:
        for token in tokens:
            seq.append_token(token)
        if self.manager.can_append(seq):
            self.manager.may_append(seq)
            return True
        del seq.token_ids[seq.num_tokens - len(tokens) :]
        seq.num_tokens -= len(tokens)
        return False

    def table(self, seq: NanoSequence) -> Sequence[int]:
        return seq.block_table

    def free(self, seq: NanoSequence) -> None:
        self.manager.deallocate(seq)


class VllmPool:
    """vLLM's `BlockPool` as a `Pool`. Its block 0 is the null block, which is nobody's to take."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def take(self, n: int) -> Sequence[int]:
        return [block.block_id for block in self.pool.get_new_blocks(n)]

    def share(self, block: int) -> None:
        self.pool.touch([self.pool.blocks[block]])

    def give_back(self, blocks: Sequence[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in blocks])

    def refs(self, block: int) -> int:
        return int(self.pool.blocks[block].ref_cnt)


def _as_it_is(made: Any) -> Any:
    return made


INTERFACES: tuple[tuple[tuple[str, ...], type[RuleBasedStateMachine], Callable[[Any], Callable[..., Any]]], ...] = (
    (("take", "share", "give_back", "refs"), BlocksMachine, _as_it_is),
    (("allocate", "append", "written", "table", "free"), SequencesMachine, _as_it_is),
    (("take", "share", "release", "withdraw"), BlocksMachine, lambda cls: lambda n: OurPool(cls(n))),
    (("admit", "reserve", "commit", "release"), SequencesMachine, lambda cls: lambda n, size: OurManager(cls(n, size))),
    (("can_allocate", "may_append", "deallocate"), SequencesMachine, lambda cls: lambda n, size: Nano(cls(n, size))),
    (
        ("get_new_blocks", "touch", "free_blocks"),
        BlocksMachine,
        lambda cls: lambda n: VllmPool(cls(n + 1, enable_caching=True, hash_block_size=1)),
    ),
)
"""The methods that tell an interface, the machine for it, and what makes an adapter of the class."""


def machine_for(target: str, known: Collection[str] = ()) -> type[RuleBasedStateMachine]:
    """A machine for the class at "module:Class", without the checks that are `known` to fail.

    Raises `UnusableTarget`, and `InvalidArgument` for an unknown check.
    """
    made = _import(target)
    for methods, machine, adapter in INTERFACES:
        if all(callable(getattr(made, method, None)) for method in methods):
            checks = POOL_CHECKS if machine is BlocksMachine else ALLOCATOR_CHECKS
            if unknown := set(known) - set(checks):
                raise InvalidArgument(f"no check is called {sorted(unknown)[0]!r}, there are: {', '.join(checks)}")
            namespace: dict[str, Any] = {"make": staticmethod(adapter(made)), "known": frozenset(known)}
            namespace["__module__"] = machine.__module__
            return cast(type[RuleBasedStateMachine], StateMachineMeta(machine.__name__, (machine,), namespace))
    known_ones = "; ".join(", ".join(methods) for methods, _, _ in INTERFACES)
    raise UnusableTarget(f"{target} has none of the known interfaces: {known_ones}")


def _import(target: str) -> Any:
    name, _, attribute = target.partition(":")
    if not attribute:
        raise UnusableTarget(f"{target!r} is not module:Class")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return getattr(_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnusableTarget(f"{target} can't be imported: {error}") from error


def _module(name: str) -> ModuleType:
    """The module; if need be without its packages' __init__: nano-vllm's asks for a GPU, its allocator doesn't."""
    try:
        return import_module(name)
    except ImportError:
        parts = name.split(".")[:-1]
        spec = find_spec(parts[0]) if parts else None
        if spec is None or spec.submodule_search_locations is None:
            raise
        top = Path(next(iter(spec.submodule_search_locations)))
        for i in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:i]))
            package.__path__ = [str(top.joinpath(*parts[1:i]))]
            sys.modules[package.__name__] = package
        return import_module(name)
