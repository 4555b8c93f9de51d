"""Hashes and namespaces: the values themselves, since another process or release has to find the same ones."""

from __future__ import annotations

import itertools
import re
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof.allocator import InvalidArgument, Namespace, xxh3_chained

NAMES = st.none() | st.text(alphabet=st.characters(), max_size=4)


@pytest.mark.parametrize(
    ("tokens", "parent_hash", "expected"),
    [
        ([], 0, 0x2D06800538D394C2),  # XXH3's own test vector for no input
        ([0], 0, 0x48B2C92616FC193D),
        ([1, 2, 3, 4], 0, 0x6FC1EBD4F4D6EA31),
        ([1, 2, 3, 4], 1, 0xB8603AE7DE7EA44F),
        ([2**31 - 1] * 16, 2**64 - 1, 0xA790F1E9BBEA4117),
        (range(256), 0, 0xD12BA3BA3964C7ED),
    ],
)
def test_golden_hashes(tokens: list[int], parent_hash: int, expected: int) -> None:
    assert xxh3_chained(array("i", tokens).tobytes(), parent_hash) == expected


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [
        (Namespace(), 0x2D06800538D394C2),
        (Namespace(salt="x"), 0x578B705BE0FFC660),
        (Namespace(adapter="x"), 0x5571DE474CD6EB16),
        (Namespace(salt="Mandant 7", adapter="sql-lora"), 0xB7BE4F20DA1A54B9),
    ],
)
def test_golden_roots(namespace: Namespace, expected: int) -> None:
    assert namespace.root_hash(xxh3_chained) == expected


def encoding(namespace: Namespace) -> bytes:
    """What is hashed, by way of a hash that keeps it."""
    return int.to_bytes(namespace.root_hash(lambda data, parent: int.from_bytes(b"\1" + data, "big")), 128, "big")


def test_look_alikes_stay_apart() -> None:
    """Fields that run together, or a value that spells another one's tag and length."""
    look_alikes = [
        Namespace(),
        Namespace(salt=""),
        Namespace(adapter=""),
        Namespace(salt="", adapter=""),
        Namespace(salt="x"),
        Namespace(adapter="x"),
        Namespace(salt="x", adapter="x"),
        Namespace(salt="xy"),
        Namespace(salt="x", adapter="y"),
        Namespace(salt="xa\1\0\0\0\0\0\0\0y"),
        Namespace(salt="a", adapter="bc"),
        Namespace(salt="ab", adapter="c"),
    ]
    for one, other in itertools.combinations(look_alikes, 2):
        assert one != other
        assert encoding(one) != encoding(other)
        assert one.root_hash(xxh3_chained) != other.root_hash(xxh3_chained)


@given(NAMES, NAMES, NAMES, NAMES)
def test_equal_encodings_are_equal_namespaces(
    salt: str | None, adapter: str | None, other_salt: str | None, other_adapter: str | None
) -> None:
    one, other = Namespace(salt, adapter), Namespace(other_salt, other_adapter)
    assert (encoding(one) == encoding(other)) == (one == other)


def test_half_a_surrogate_pair_is_a_salt() -> None:
    """JSON can spell one, and a tenant who sends it must not stop an engine."""
    assert Namespace(salt="\ud800").root_hash(xxh3_chained) != Namespace(salt="\ud801").root_hash(xxh3_chained)


@pytest.mark.parametrize("field", ["salt", "adapter"])
@pytest.mark.parametrize("value", [7, True, b"x", 1.5, ["x"]])
def test_names_are_strings(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"{field} is {value!r}, must be a string or None")):
        Namespace(**{field: value})
