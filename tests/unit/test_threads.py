"""Debug mode: one thread, one call at a time; and it is not there when it is off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvproof.allocator import LRU, Admission, BlockManager, ConcurrencyError, KvproofError, Sequence, xxh3_chained
from kvproof.fuzz.machines.harness import fingerprint


def in_thread(name: str, call: Callable[[], object]) -> Exception | None:
    """What `call` raised in a thread of that name."""
    raised: list[Exception] = []

    def body() -> None:
        try:
            call()
        except KvproofError as error:
            raised.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def running(manager: BlockManager) -> Sequence:
    seq = manager.sequence([1, 2, 3])
    assert manager.admit(seq) is Admission.NOW
    return seq


CALLS: dict[str, Callable[[BlockManager, Sequence], object]] = {
    "sequence": lambda manager, seq: manager.sequence([1]),
    "match": lambda manager, seq: manager.match(seq),
    "can_admit": lambda manager, seq: manager.can_admit(seq),
    "admit": lambda manager, seq: manager.admit(seq),
    "reserve": lambda manager, seq: manager.reserve(seq),
    "commit": lambda manager, seq: manager.commit(seq),
    "fork": lambda manager, seq: manager.fork(seq),
    "truncate": lambda manager, seq: manager.truncate(seq, 1),
    "release": lambda manager, seq: manager.release(seq),
    "pin": lambda manager, seq: manager.pin(seq),
    "launch": lambda manager, seq: manager.launch([seq]),
    "take_copies": lambda manager, seq: manager.take_copies(),
    "take_events": lambda manager, seq: manager.take_events(),
    "stats": lambda manager, seq: manager.stats(),
    "check": lambda manager, seq: manager.check(),
    "reset_prefix_cache": lambda manager, seq: manager.reset_prefix_cache(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused_by_name(name: str) -> None:
    manager = BlockManager(8, 2, debug=True)
    seq = running(manager)
    before = fingerprint(manager)
    error = in_thread("intruder", lambda: CALLS[name](manager, seq))
    assert isinstance(error, ConcurrencyError)
    assert str(error) == f"{name} is called in thread 'intruder', 'MainThread' was here first"
    assert fingerprint(manager) == before
    manager.commit(seq)  # and the owner goes on


def test_the_owner_is_the_first_to_use_it_not_its_maker() -> None:
    manager = BlockManager(8, 2, debug=True)
    assert in_thread("engine", lambda: running(manager)) is None
    with pytest.raises(ConcurrencyError, match=r"^sequence is called in thread 'MainThread', 'engine' was here first$"):
        manager.sequence([1])


def test_each_manager_has_its_own_guard() -> None:
    one, other = BlockManager(8, 2, debug=True), BlockManager(8, 2, debug=True)
    running(one)
    assert in_thread("engine", lambda: running(other)) is None


def test_a_hash_function_that_calls_back() -> None:
    def calls_back(tokens: bytes, parent: int) -> int:
        if seqs:
            manager.release(seqs[0])
        return xxh3_chained(tokens, parent)

    seqs: list[Sequence] = []
    manager = BlockManager(8, 2, debug=True, hash_block=calls_back)
    seq = running(manager)
    manager.commit(seq, 2)  # there is something to look up
    seqs.append(seq)
    other = manager.sequence([4, 5, 6])
    before = fingerprint(manager)
    with pytest.raises(ConcurrencyError, match=r"^release is called from inside admit, in thread 'MainThread'$"):
        manager.admit(other)
    assert fingerprint(manager) == before
    seqs.clear()
    assert manager.admit(other) is Admission.NOW  # an error does not leave it locked


def test_a_policy_that_calls_back() -> None:
    class Curious(LRU):
        def pop(self) -> int:
            manager.check()
            return super().pop()

    manager = BlockManager(2, 2, debug=True, policy=Curious())
    seq = running(manager)
    manager.commit(seq, 3)
    manager.release(seq)
    with pytest.raises(ConcurrencyError, match=r"^check is called from inside admit"):
        manager.admit(manager.sequence([9] * 4))


def test_off_it_is_not_there() -> None:
    manager = BlockManager(8, 2)
    assert not {name for name in vars(manager) if callable(getattr(BlockManager, name, None))}
    assert in_thread("other", lambda: running(manager)) is None
    running(manager)


def test_a_look_at_a_row_of_a_batch_is_an_operation() -> None:
    """It may bring the sequence up to date, which two threads must not do at once."""
    manager = BlockManager(8, 2, debug=True)
    seq = running(manager)
    manager.commit(seq, 2)
    batch = manager.decode_batch(1)
    assert batch.add(seq)
    with ThreadPoolExecutor(1) as other:
        for look in (lambda: len(seq), lambda: seq.num_computed, seq.tokens, batch.reserve):
            with pytest.raises(ConcurrencyError, match="'MainThread' was here first"):
                other.submit(look).result()
    assert (len(seq), seq.num_computed) == (3, 2)
    manager.release(seq)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: len(seq)).result() == 3
