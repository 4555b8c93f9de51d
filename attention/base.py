"""What an attention backend is: declared capabilities, one plan per step, one call per layer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvproof.allocator.errors import InvalidArgument
from kvproof.attention.errors import InvalidSpec, NotPlanned, UnsupportedSpec
from kvproof.attention.large_pages import ask_for_large_pages
from kvproof.attention.ownership import Ownership
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec, DType, Layout

Feature = Literal["custom_scale", "window", "soft_cap", "fp8_cache", "lse"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports. None is anything that a `CacheSpec` may hold.

    `devices` are torch device types. `features` are optional abilities. A spec can ask for four of them:
    "custom_scale", a softmax scale other than 1/sqrt(head_size); "window"; "soft_cap"; "fp8_cache", a `cache_dtype`.
    The fifth, "lse", is `AttentionBackend.attend_lse`.
    """

    devices: frozenset[str]
    dtypes: frozenset[DType] | None = None
    head_sizes: frozenset[int] | None = None
    group_sizes: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None
    layouts: frozenset[Layout] | None = None
    features: frozenset[Feature] = frozenset()

    def check(self, spec: CacheSpec, backend: str = "chosen") -> None:
        """Raise `UnsupportedSpec`, naming the first feature that `spec` asks for and `backend` lacks."""
        demands: tuple[tuple[str, object, frozenset[str] | frozenset[int] | None], ...] = (
            ("device", torch.device(spec.device).type, self.devices),
            ("dtype", spec.dtype, self.dtypes),
            ("head_size", spec.head_size, self.head_sizes),
            ("group_size", spec.group_size, self.group_sizes),
            ("block_size", spec.block_size, self.block_sizes),
            ("layout", spec.layout, self.layouts),
        )
        for feature, value, supported in demands:
            if supported is not None and value not in supported:
                raise UnsupportedSpec(backend, feature, value, ", ".join(map(str, sorted(supported))))
        if spec.scale is not None and "custom_scale" not in self.features:
            raise UnsupportedSpec(backend, "scale", spec.scale, "only the default, 1/sqrt(head_size)")
        optional: tuple[tuple[Feature, float | None], ...] = (("window", spec.window), ("soft_cap", spec.soft_cap))
        for feature, value in optional:
            if value is not None and feature not in self.features:
                raise UnsupportedSpec(backend, feature, value, "only attention without it")
        if spec.cache_dtype is not None and "fp8_cache" not in self.features:
            raise UnsupportedSpec(backend, "cache_dtype", spec.cache_dtype, "only caches of the model's dtype")


class AttentionBackend(ABC):
    """A KV cache and the attention over it.

    A backend of your own sets `name` and implements `capabilities` and `_attend`, and `_attend_lse` where it declares
    "lse"; `_plan` is the place for work that all layers of a step share, and the rest has defaults. It registers under
    the entry-point group `kvproof.attention_backends`.

        class MyAttention(AttentionBackend):
            name = "mine"

            @classmethod
            def capabilities(cls) -> Capabilities:
                return Capabilities(devices=frozenset({"cpu"}))

            def _attend(self, layer: int, q: Tensor) -> Tensor:
                keys, values = self.kv(layer)
                ...  # follow self.batch
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    """`auto` takes the available backend of the highest priority; a negative one is only used when named."""

    graph_sizes: ClassVar[tuple[int, ...]] = ()
    """Numbers of rows, ascending, for which a step of decodes reads all metadata from memory that stays where it is,
    so that it can be captured in a CUDA graph. Steps of other sizes are padded to them, see `graph_rows`."""

    def __init__(self, spec: CacheSpec) -> None:
        """Raises `BackendUnavailable` on a machine it can't run on, `UnsupportedSpec` on a cache it lacks."""
        self.probe()
        self.capabilities().check(spec, self.name)
        self.spec = spec
        self.cache = self.create_cache(spec)
        self._ownership = Ownership(spec)
        self._batch: BatchPlan | None = None
        self._tokens = torch.empty((3, 0), dtype=torch.int64)

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities: ...

    @classmethod  # noqa: B027
    def probe(cls) -> None:
        """Raise `BackendUnavailable` if the backend can't run on this machine. Loads nothing heavy."""

    def create_cache(self, spec: CacheSpec) -> Tensor:
        """A zeroed cache of `spec.cache_shape`. Zeroed, because a kernel may multiply unused slots by 0.

        Raises `InvalidSpec` when the device has no room for it.
        """
        size = spec.num_blocks * spec.block_bytes
        # A processor's memory is handed out on credit: without this, the process would be killed when it is used.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if torch.device(spec.device).type == "cpu" and size > memory:
            raise InvalidSpec(f"{spec.num_blocks} blocks of {spec.block_bytes} bytes need {size}, there are {memory}")
        try:
            cache = torch.empty(spec.cache_shape, dtype=spec.torch_cache_dtype, device=spec.device)
            if cache.device.type == "cpu":
                ask_for_large_pages(cache)
            return cache.zero_()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InvalidSpec(f"{spec.device} has no room for {size} bytes of KV cache: {reason}") from error

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of `layer`, [num_blocks, block_size, num_kv_heads, head_size] in either layout.

        They are views of the cache: writing to them writes to it. With a `cache_dtype`, they are what is stored.
        """
        cache = self.cache[layer]
        if self.spec.layout == "HND":
            cache = cache.transpose(2, 3)
        return cache[:, 0], cache[:, 1]

    @property
    def batch(self) -> BatchPlan:
        """The planned step. Raises `NotPlanned` before the first one."""
        if self._batch is None:
            raise NotPlanned(f"the {self.name} backend has no plan; call plan() before run()")
        return self._batch

    def plan(self, batch: BatchPlan) -> None:
        """Prepare the step that every following `run` belongs to. Raises `InvalidBatch`; the old plan stands.

        A backend serves one thread at a time: `plan`, `run` and `copy_blocks` must not overlap.
        """
        batch.validate(self.spec, self._ownership)
        self._plan(batch)
        self._tokens = self._place_tokens(batch)
        self._batch = batch

    @property
    def positions(self) -> Tensor:
        """int64 [T] on the cache's device: the planned step's `BatchPlan.positions`. Valid until the next plan."""
        return self._tokens[2]

    def graph_rows(self, batch: BatchPlan) -> int | None:
        """Which of `graph_sizes` a step of `batch` should be padded to; None is as it is, and not from a graph."""
        return None

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the step's keys and values into `layer`, then attend causally to each row's own tokens.

        q [T, num_heads, head_size], k and v [T, num_kv_heads, head_size], of the spec's dtype and device,
        rotary embedding applied; returns [T, num_heads, head_size]. Raises `InvalidArgument` on anything
        else, and `NotPlanned` before the first `plan`; the cache is then unchanged.
        """
        spec, tokens = self.spec, self.batch.num_tokens
        self._check_layer(layer)
        self._check("q", q, (tokens, spec.num_heads, spec.head_size))
        self._check("k", k, (tokens, spec.num_kv_heads, spec.head_size))
        self._check("v", v, (tokens, spec.num_kv_heads, spec.head_size))
        with torch.no_grad():
            self._write(layer, k, v)
            return self._attend(layer, q)

    def step_attention(self) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """`run` for the planned step's model runner: a `CompiledAttention` where the backend has one."""
        return self.run

    def attend_lse(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """`run` without the write, and beside its result the log-sum-exp of each query's scores.

        The latter is float32 [T, num_heads], the natural logarithm of what softmax divides by (scores are scaled,
        capped and masked): with it, attention over parts of a sequence is merged. Raises `UnsupportedSpec` where "lse"
        is not declared, `InvalidArgument` on a layer that does not exist or a q that does not fit, and `NotPlanned`.
        """
        features = self.capabilities().features
        if "lse" not in features:
            raise UnsupportedSpec(self.name, "feature", "lse", ", ".join(sorted(features)) or "no features")
        self._check_layer(layer)
        self._check("q", q, (self.batch.num_tokens, self.spec.num_heads, self.spec.head_size))
        with torch.no_grad():
            return self._attend_lse(layer, q)

    def copy_blocks(self, orders: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in all layers, each order being (source, destination).

        Every source is read before any destination is written. Raises `InvalidArgument` on a block that does
        not exist and on a destination named twice; nothing is then copied.
        """
        if not orders:
            return
        for block in (block for order in orders for block in order):
            if not 0 <= block < self.spec.num_blocks:
                raise InvalidArgument(
                    f"copy order names block {block}; the cache has blocks 0 to {self.spec.num_blocks - 1}"
                )
        sources, destinations = zip(*orders, strict=True)
        if len(set(destinations)) < len(destinations):
            raise InvalidArgument(f"copy orders write a block twice: destinations {list(destinations)}")
        index = to_device(torch.tensor((sources, destinations), device="cpu"), self.cache.device)
        cache = _movable(self.cache)
        cache.index_copy_(1, index[1], cache.index_select(1, index[0]))

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.spec.num_layers:
            raise InvalidArgument(f"layer is {layer}; it must be 0 to {self.spec.num_layers - 1}")

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, int, int]) -> None:
        if tensor.shape != shape:
            raise InvalidArgument(f"{name} has shape {list(tensor.shape)}; this step needs {list(shape)}")
        if tensor.dtype is not self.spec.torch_dtype:
            raise InvalidArgument(f"{name} is {tensor.dtype}; the cache is {self.spec.torch_dtype}")
        if tensor.device != self.cache.device:
            raise InvalidArgument(f"{name} is on {tensor.device}; the cache is on {self.cache.device}")

    def _plan(self, batch: BatchPlan) -> None:  # noqa: B027
        """Prepare a validated batch; it becomes `self.batch` on return. Raise before changing anything."""

    def _place_tokens(self, batch: BatchPlan) -> Tensor:
        """`token_index` of the batch on the cache's device. Called after `_plan`."""
        return to_device(token_index(batch, self.spec.block_size), self.spec.device)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._write_at(self._tokens, layer, k, v)

    def _write_at(self, tokens: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.kv(layer)
        slots = tokens[0], tokens[1]
        _movable(keys).index_put_(slots, _movable(self._stored(k, self.spec.k_scale)))
        _movable(values).index_put_(slots, _movable(self._stored(v, self.spec.v_scale)))

    def _stored(self, x: Tensor, scale: float) -> Tensor:
        """Keys or values as the cache holds them. What is too large becomes the largest number there is."""
        if self.spec.cache_dtype is None:
            return x
        dtype = self.spec.torch_cache_dtype
        largest = torch.finfo(dtype).max  # PyTorch's conversion saturates by itself, but has not always
        return (x.float() / scale).clamp(-largest, largest).to(dtype)

    @abstractmethod
    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of q [T, num_heads, head_size] over the cache that `self.batch` describes; same shape."""

    def _attend_lse(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """`_attend`, and the scores' log-sum-exp. For backends that declare "lse"."""
        raise NotImplementedError


def token_index(batch: BatchPlan, block_size: int) -> Tensor:
    """int64 [3, T] on the CPU: each token's block, its offset in the block, and its position."""
    slots = batch.slot_mapping.long()
    return torch.stack((slots // block_size, slots % block_size, batch.positions.long()))


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host's on `device`, without waiting for what was submitted there before.

    From pinned memory, which PyTorch gives to others only when the copy has been made.
    """
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def _movable(tensor: Tensor) -> Tensor:
    """8-bit floats as bytes, since PyTorch can't index them on every device."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
