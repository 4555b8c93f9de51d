"""A sequence's tokens: a private copy, integers of the right range, and all of an extension or none."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator

import pytest

from kvproof.allocator import (
    Admission,
    BlockManager,
    IllegalTransition,
    InvalidArgument,
    MediaItem,
    Namespace,
    SequenceStateError,
)


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8, 2)


def test_the_callers_list_is_not_the_sequences(manager: BlockManager) -> None:
    """Changed after hand-over, it must reach neither the tokens nor, through them, the cache."""
    tokens = [1, 2, 3]
    seq = manager.sequence(tokens)
    tokens[0] = 9
    more = array("i", [4, 5])
    seq.extend(more)
    more[0] = 9
    assert seq.tokens().tolist() == [1, 2, 3, 4, 5]
    seq.tokens()[0] = 9
    assert seq.tokens().tolist() == [1, 2, 3, 4, 5]
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq, 5)
    assert manager.match(manager.sequence([1, 2, 3, 4, 5])) == 4
    assert manager.match(manager.sequence([9, 2, 3, 9, 5])) == 0


@pytest.mark.parametrize(
    "tokens",
    [
        [97, 98, 99, 100],
        (97, 98, 99, 100),
        range(97, 101),
        iter([97, 98, 99, 100]),
        array("q", [97, 98, 99, 100]),
        b"abcd",  # not one token 0x64636261
        bytearray(b"abcd"),
        memoryview(b"abcd"),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_any_iterable_of_integers(manager: BlockManager, tokens: Iterable[int]) -> None:
    seq = manager.sequence(tokens)
    assert (seq.tokens().typecode, seq.tokens().tolist()) == ("i", [97, 98, 99, 100])


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31, 2**32, -(2**70), 10**30, 1.5, 2.0, "7", "abc", None, [1]])
def test_what_is_no_token_id_adds_nothing(manager: BlockManager, bad: int) -> None:
    message = re.escape(f"{bad!r} is no token id, must be an integer from 0 to 2147483647")
    seq = manager.sequence([1, 2])
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        manager.sequence([1, bad, 2])
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        seq.append(bad)
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        seq.extend(token for token in (3, bad))
    assert seq.tokens().tolist() == [1, 2]


def test_the_first_bad_one_is_named(manager: BlockManager) -> None:
    with pytest.raises(InvalidArgument, match=r"^2147483648 is no token id"):
        manager.sequence([0, 1, 2**31, "x"])
    with pytest.raises(InvalidArgument, match=r"^-1 is no token id"):
        manager.sequence([0, -1, 2**31])


@pytest.mark.parametrize("bad", [None, 7, 1.5])
def test_tokens_are_iterable(manager: BlockManager, bad: Iterable[int]) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(repr(bad))):
        manager.sequence(bad)


def test_an_iterable_that_fails_adds_nothing(manager: BlockManager) -> None:
    def failing() -> Iterator[int]:
        yield 3
        raise OSError("connection lost")

    seq = manager.sequence([1, 2])
    with pytest.raises(OSError, match="connection lost"):
        seq.extend(failing())
    assert seq.tokens().tolist() == [1, 2]


def test_the_limits_themselves_are_token_ids(manager: BlockManager) -> None:
    seq = manager.sequence([0])
    seq.append(2**31 - 1)
    assert seq.tokens().tolist() == [0, 2**31 - 1]
    assert seq.tokens(1).tolist() == [2**31 - 1]
    assert seq.tokens(0, 1).tolist() == [0]


@pytest.mark.parametrize("tokens", [[], (), "", b"", iter([])])
def test_a_sequence_is_not_empty(manager: BlockManager, tokens: Iterable[int]) -> None:
    with pytest.raises(InvalidArgument, match="at least one token"):
        manager.sequence(tokens)


@pytest.mark.parametrize("max_length", [2, 0, -1, 2**31, True, 3.0, "3"])
def test_max_length_out_of_range(manager: BlockManager, max_length: int) -> None:
    expected = f"max_length is {max_length!r}, must be an integer from 3 to 2147483647"
    with pytest.raises(InvalidArgument, match=re.escape(expected)):
        manager.sequence([1, 2, 3], max_length=max_length)


def test_the_counts_of_a_life(manager: BlockManager) -> None:
    def counts() -> tuple[int, int, int, int, int]:
        return len(seq), seq.num_reserved, seq.num_computed, seq.num_cached, len(seq.block_table)

    seq = manager.sequence([1, 2, 3, 4, 5], max_length=9)
    assert counts() == (5, 0, 0, 0, 0)
    manager.admit(seq, limit=3)
    assert counts() == (5, 3, 0, 0, 2)
    manager.commit(seq, 3)
    manager.reserve(seq, 2)
    manager.commit(seq, 2)
    assert counts() == (5, 5, 5, 0, 3)
    seq.append(6)
    assert repr(seq) == "<Sequence of 6 tokens, 5 computed, 5 reserved, 3 blocks>"
    manager.release(seq)
    assert counts() == (6, 0, 0, 0, 0)
    manager.admit(seq)
    assert counts() == (6, 6, 4, 4, 3)
    manager.release(seq)
    assert counts() == (6, 0, 0, 4, 0)  # num_cached still speaks of the last admission


HUGE = 10**5000  # too long for Python to write out


@pytest.mark.parametrize("bad", [HUGE, -HUGE, True], ids=["huge", "minus huge", "True"])
def test_numbers_that_cannot_be_written_out_are_refused_like_others(manager: BlockManager, bad: int) -> None:
    shown = "True" if bad is True else "<int of 16610 bits>"
    seq = manager.sequence([1, 2])
    assert manager.admit(seq) is Admission.NOW
    calls: list[tuple[str, Callable[[], object]]] = [
        ("max_length is", lambda: manager.sequence([1], max_length=bad)),
        ("n is", lambda: manager.reserve(seq, bad)),
        ("lookahead is", lambda: manager.reserve(seq, 0, lookahead=bad)),
        ("n is", lambda: manager.commit(seq, bad)),
        ("length is", lambda: manager.truncate(seq, bad)),
        ("limit is", lambda: manager.can_admit(manager.sequence([1]), bad)),
        ("num_blocks is", lambda: BlockManager(bad, 1)),
        ("block_size is", lambda: BlockManager(1, bad)),
        ("watermark is", lambda: BlockManager(1, 1, watermark=bad)),
        ("window is", lambda: BlockManager(2, 1, window=bad)),
        ("media start is", lambda: MediaItem("k", bad, 1)),
        ("media length is", lambda: MediaItem("k", 0, bad)),
        ("salt is", lambda: Namespace(salt=bad)),  # type: ignore[arg-type]
    ]
    if bad is not True:  # as everywhere in Python, True is the integer 1; refusing it would cost a check of each token
        calls.append(("is no token id", lambda: manager.sequence([1, bad])))
        calls.append(("is no token id", lambda: seq.append(bad)))
    for what, call in calls:
        with pytest.raises(InvalidArgument) as error:
            call()
        assert what in str(error.value)
        assert shown in str(error.value)
    with pytest.raises(SequenceStateError, match=re.escape(f"step {shown} can't retire")):
        manager.retire(bad)
    if bad is not True:
        with pytest.raises(IllegalTransition, match=re.escape(f"there is no block {shown}, the pool has 0 to 7")):
            manager.pool.refs(bad)


@pytest.mark.parametrize("namespace", ["x", None, ("x", None), Namespace])
def test_a_namespace_is_a_namespace(manager: BlockManager, namespace: Namespace) -> None:
    expected = f"namespace is {namespace!r}, must be a Namespace"
    with pytest.raises(InvalidArgument, match=f"^{re.escape(expected)}$"):
        manager.sequence([1], namespace=namespace)


def test_media_are_media_items(manager: BlockManager) -> None:
    with pytest.raises(InvalidArgument, match=re.escape("media holds 'x', must be MediaItems")):
        manager.sequence([1], media=[MediaItem("k", 0, 1), "x"])  # type: ignore[list-item]
