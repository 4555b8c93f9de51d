"""What an attention backend must refuse, and that it says truly what it supports."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, TypeVar, get_args

import torch
from hypothesis import strategies as st

from kvproof.allocator import InvalidArgument, KvproofError
from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec, Feature, NotPlanned, UnsupportedSpec
from kvproof.fuzz.conformance.batches import (
    BLOCK_SIZES,
    DTYPES,
    FEATURES,
    GROUP_SIZES,
    HEAD_SIZES,
    LAYOUTS,
    Batch,
    Row,
)
from kvproof.fuzz.conformance.driving import Ran, assert_right, bits, decodes_first, inputs, planned, primed, step

Backend = type[AttentionBackend]
Refusal = TypeVar("Refusal", bound=KvproofError)


def refusals_change_nothing(backend: Backend, batch: Batch, data: st.DataObject) -> None:
    """Bad calls raise an error of ours, and the planned step then runs as if they had not been made."""
    spec, rows = batch.spec, decodes_first(batch.rows)
    it = primed(backend, spec, rows)
    with_error(NotPlanned, lambda: it.run(0, *inputs(rows, 0)), "run before plan")
    it.plan(planned(spec, rows))
    before = bits(it.cache).clone()
    for name, error, call in _bad_calls(it, rows):
        with_error(error, call, name)
        assert torch.equal(bits(it.cache), before), f"{name}: refused, and the cache has changed"
    results = [it.run(layer, *inputs(rows, layer)) for layer in range(spec.num_layers)]
    assert_right(spec, rows, Ran(rows, results).outputs())


def _bad_calls(it: AttentionBackend, rows: list[Row]) -> Iterator[tuple[str, type[KvproofError], Callable[[], object]]]:
    spec, plan = it.spec, planned(it.spec, rows)
    q, k, v = inputs(rows, 0)
    other = torch.float32 if q.dtype is not torch.float32 else torch.float16
    longer = [torch.cat((x, x.new_ones(1, *x.shape[1:]))) for x in (q, k, v)]
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("a layer too high", lambda: it.run(spec.num_layers, q, k, v)),
        ("a negative layer", lambda: it.run(-1, q, k, v)),
        ("q too long", lambda: it.run(0, longer[0], k, v)),
        ("k too long", lambda: it.run(0, q, longer[1], v)),
        ("v too long", lambda: it.run(0, q, k, longer[2])),
        ("a head too many", lambda: it.run(0, torch.cat((q, q[:, :1]), dim=1), k, v)),
        ("q of another dtype", lambda: it.run(0, q.to(other), k, v)),
        ("v of another dtype", lambda: it.run(0, q, k, v.to(other))),
        ("v on another device", lambda: it.run(0, q, k, v.to("meta"))),
        ("an invalid plan", lambda: it.plan(replace(plan, num_decodes=plan.num_decodes + 1))),
        (
            "a plan with a block that is not there",
            lambda: it.plan(BatchPlan.build([array("i", [spec.num_blocks])], [1], [1], spec.block_size)),
        ),
        ("a copy from a block that is not there", lambda: it.copy_blocks([(0, 0), (spec.num_blocks, 0)])),
        ("a copy to a negative block", lambda: it.copy_blocks([(0, 0), (0, -1)])),
        ("two copies to one block", lambda: it.copy_blocks([(spec.num_blocks - 1, 0), (0, 0)])),
    )
    for name, call in calls:
        yield name, InvalidArgument, call


def with_error(expected: type[Refusal], call: Callable[[], object], name: str) -> Refusal:
    """What `call` raises, which must be an `expected` whose message is one line."""
    try:
        call()
    except Exception as raised:
        error = raised
    else:
        raise AssertionError(f"{name}: accepted")
    if not isinstance(error, expected):
        raise AssertionError(f"{name}: {type(error).__name__} instead of {expected.__name__}: {error}") from error
    assert "\n" not in str(error), f"{name}: the message has more than one line"
    return error


def declared_is_supported(backend: Backend, device: str) -> None:
    """Every dtype, layout, head size, group size and block size that is declared works, each beside the others' first.

    Where anything is declared, the corners of what a spec may hold.
    """
    declared = backend.capabilities()
    unknown = declared.features - set(get_args(Feature))
    assert not unknown, f"there are no features {sorted(unknown)}; there are {', '.join(get_args(Feature))}"
    values: dict[str, list[Any]] = {
        "dtype": sorted(declared.dtypes or DTYPES),
        "layout": sorted(declared.layouts or LAYOUTS),
        "head_size": sorted(declared.head_sizes or (*HEAD_SIZES, 512)),
        "group_size": sorted(declared.group_sizes or GROUP_SIZES),
        "block_size": sorted(declared.block_sizes or BLOCK_SIZES),
    }
    first = {name: choices[0] for name, choices in values.items()}
    asked = [{name: value} for name, choices in values.items() for value in choices]
    asked += [fields for feature, choices in FEATURES.items() if feature in declared.features for fields in choices]
    for fields in asked:
        spec = _spec(device, **(first | fields))
        rows = _two_rows(spec)
        try:
            assert_right(spec, rows, step(primed(backend, spec, rows), rows))
        except Exception as error:
            raise AssertionError(f"{fields} is declared: {type(error).__name__}: {error}") from error


def undeclared_is_refused(backend: Backend, device: str) -> None:
    """With `UnsupportedSpec`, which names what is not supported."""
    declared = backend.capabilities()
    first: dict[str, Any] = {
        "dtype": min(declared.dtypes or DTYPES),
        "layout": min(declared.layouts or LAYOUTS),
        "head_size": min(declared.head_sizes or HEAD_SIZES),
        "group_size": min(declared.group_sizes or GROUP_SIZES),
        "block_size": min(declared.block_sizes or BLOCK_SIZES),
    }
    possible: dict[str, tuple[Any, ...]] = {
        "dtype": DTYPES,
        "layout": LAYOUTS,
        "head_size": tuple(range(1, 513)),
        "group_size": tuple(range(1, 33)),
        "block_size": tuple(range(1, 129)),
    }
    for name, values in possible.items():
        supported = getattr(declared, f"{name}s")
        for value in () if supported is None else sorted(set(values) - supported):
            _refuses(backend, _spec(device, **(first | {name: value})), name)
    for other in sorted({"cpu", "cuda", "meta"} - declared.devices):
        _refuses(backend, _spec(other, **first), "device")
    for feature in FEATURES.keys() - declared.features:
        for fields in FEATURES[feature]:
            _refuses(backend, _spec(device, **(first | fields)), next(iter(fields)), feature)
    if "lse" not in declared.features:
        spec = _spec(device, **first)
        rows = _two_rows(spec)
        step(it := primed(backend, spec, rows), rows)
        with_error(UnsupportedSpec, lambda: it.attend_lse(0, inputs(rows, 0)[0]), "attend_lse, which is not declared")


def _refuses(backend: Backend, spec: CacheSpec, *names: str) -> None:
    """A feature goes by the name of a spec's field, or by its own."""
    what = f"{names[0]} {getattr(spec, names[0])}, which is not declared"
    error = with_error(UnsupportedSpec, lambda: backend(spec), what)
    assert error.feature in names, f"{what}: the error names {error.feature}"


def _spec(device: str, *, group_size: int, **fields: Any) -> CacheSpec:
    return CacheSpec(num_layers=2, num_heads=2 * group_size, num_kv_heads=2, device=device, num_blocks=6, **fields)


def _two_rows(spec: CacheSpec) -> list[Row]:
    """A decode after one block and a prompt of three tokens or fewer, in scattered blocks."""
    generator, blocks = torch.Generator().manual_seed(0), Random(0).sample(range(6), 6)

    def values(length: int, heads: int) -> torch.Tensor:
        shape = (spec.num_layers, length, heads, spec.head_size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(spec.device, spec.torch_dtype)

    rows = []
    for seq_len, query_len in ((spec.block_size + 1, 1), (3, 3)):
        table = tuple(blocks.pop() for _ in range(-(-seq_len // spec.block_size)))
        k, v = values(seq_len, spec.num_kv_heads), values(seq_len, spec.num_kv_heads)
        rows.append(Row(table, values(query_len, spec.num_heads), k, v))
    return rows
