"""A stand-in for FlashInfer's paged wrappers that computes right results on the CPU and forgives nothing.

The real wrappers check little: most mistakes in their metadata end as reads outside the cache, or as attention over
the wrong tokens. This one raises `ContractViolation` on all that we know of, whether the real one does or not, and is
as unhelpful as a device may be:

- Work runs late. `plan` submits the copies of its arrays and `run` its kernel to a `Stream`; what the caller does to
  the host's arrays before they are copied shows. A lazy stream waits until somebody synchronises.
- Outputs hold NaN until a kernel fills them, and slots after the end of a sequence hold NaN once it has run.

    backend = FlashInferOverDouble(spec)        # the driver, in every other respect as it is on a GPU
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvproof.attention import Capabilities
from kvproof.attention.flashinfer import FlashInferAttention
from kvproof.attention.flashinfer_package import Kernels
from kvproof.fuzz.flashinfer_kernel import ContractViolation, Rows, attend, require

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Group sizes that the decode kernel without tensor cores has been compiled for."""


class Stream:
    """Work in order of submission, as late as anybody lets it: at a `wait`, and unless lazy after every kernel."""

    def __init__(self, *, lazy: bool = False) -> None:
        self.lazy = lazy
        self.submitted = 0
        self._pending: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> int:
        """Append `work` and return the count of submissions so far, which `wait` takes."""
        self._pending.append(work)
        self.submitted += 1
        return self.submitted

    @property
    def done(self) -> int:
        return self.submitted - len(self._pending)

    def wait(self, until: int | None = None) -> None:
        """Run what was submitted first, up to the `until`-th or everything."""
        while self._pending and (until is None or self.done < until):
            self._pending.popleft()()


class StreamEvent:
    """As `torch.cuda.Event`."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at = stream, 0

    def record(self) -> None:
        self._at = self._stream.submitted

    def synchronize(self) -> None:
        self._stream.wait(self._at)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a wrapper remembers of `plan`. `received` is what the device has: nothing until submission `copied` ran."""

    received: list[Rows]
    copied: int
    q_shape: tuple[int, int, int]
    page_shape: tuple[int, int, int]  # in the wrapper's layout
    dtype: torch.dtype
    kernel: Callable[..., None]


class _Wrapper:
    """What both wrappers share. Keywords only, and no defaults for what the real one would silently assume."""

    def __init__(
        self,
        stream: Stream,
        *,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        backend: str,
        use_tensor_cores: bool = True,
    ) -> None:
        require(float_workspace_buffer.dtype is torch.uint8, "workspace-dtype", float_workspace_buffer.dtype)
        require(float_workspace_buffer.data_ptr() % 16 == 0, "workspace-alignment", "not 16-byte aligned")
        require(not float_workspace_buffer[:: 2**16].any(), "workspace-zeroed", "it must be 0 for its first use")
        require(kv_layout in ("NHD", "HND"), "layout", kv_layout)
        require(backend != "auto", "backend", "auto stays with what its first plan chose")
        self._stream, self._layout, self._tensor_cores = stream, kv_layout, use_tensor_cores
        self._workspace_bytes = float_workspace_buffer.numel()
        self._planned: _Plan | None = None

    def _keep(
        self,
        rows: Rows,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        non_blocking: bool,
    ) -> None:
        for name, array in rows.arrays().items():
            require(array.device.type == "cpu", "index-device", f"{name} is on {array.device}, and is copied back")
        rows.check(page_size)
        group, remainder = divmod(num_qo_heads, num_kv_heads)
        require(remainder == 0, "group-size", f"{num_qo_heads} heads on {num_kv_heads}")
        require(self._tensor_cores or group in CUDA_CORE_GROUPS, "group-size", f"{group} without tensor cores")
        require(q_data_type is kv_data_type is o_data_type, "dtype", f"{q_data_type}, {kv_data_type}, {o_data_type}")
        require(window_left >= -1, "window", window_left)
        require(logits_soft_cap >= 0, "soft-cap", logits_soft_cap)
        require(sm_scale > 0, "scale", sm_scale)
        require(non_blocking, "blocking-plan", "each array's copy would wait for the device")
        self._require_copied()
        num_queries = int(rows.qo_indptr[-1])
        if (needed := 4 * num_qo_heads * (head_dim + 1) * num_queries) > self._workspace_bytes:
            raise RuntimeError(
                f"Buffer overflow when allocating memory for batch_prefill_tmp_v with size {needed} and alignment 16, "
                f"but only {self._workspace_bytes} bytes available in AlignedAllocator. Increase the workspace size."
            )
        planned, received = rows.clone(), list[Rows]()

        def copy() -> None:
            for name, array in rows.arrays().items():
                unchanged = torch.equal(array, planned.arrays()[name])
                require(unchanged, "overwritten", f"{name} was written between plan and its copy")
            received.append(rows.clone())

        page = (page_size, num_kv_heads) if self._layout == "NHD" else (num_kv_heads, page_size)
        self._planned = _Plan(
            received=received,
            copied=self._stream.submit(copy),
            q_shape=(num_queries, num_qo_heads, head_dim),
            page_shape=(*page, head_dim),
            dtype=q_data_type,
            kernel=partial(attend, causal=causal, window_left=window_left, soft_cap=logits_soft_cap, scale=sm_scale),
        )

    def _require_copied(self) -> None:
        last = self._planned
        copied = last is None or self._stream.done >= last.copied
        require(copied, "replanned-too-soon", "the wrapper's last schedule is still to be copied from its own memory")

    def run(
        self, *, q: Tensor, paged_kv_cache: Tensor, out: Tensor, lse: Tensor | None = None, return_lse: bool = False
    ) -> None:
        plan = self._planned
        if plan is None:
            raise ContractViolation("not-planned", "run before plan")
        require(plan.q_shape[0] > 0, "empty-launch", "no queries: a launch of no blocks fails")
        require(isinstance(paged_kv_cache, Tensor), "cache-type", type(paged_kv_cache))
        require(paged_kv_cache.shape[1:] == (2, *plan.page_shape), "cache-shape", tuple(paged_kv_cache.shape))
        for name, tensor in (("q", q), ("out", out)):
            require(tensor.shape == plan.q_shape, f"{name}-shape", f"{tuple(tensor.shape)}, planned {plan.q_shape}")
            require(tensor.is_contiguous(), f"{name}-contiguous", tensor.stride())
        for name, tensor in (("q", q), ("cache", paged_kv_cache), ("out", out)):
            require(tensor.dtype is plan.dtype, "dtype", f"{name} is {tensor.dtype}, planned {plan.dtype}")
            # Kernels read 16 bytes at a time. Heads too small for that are only there to be quick.
            small = tensor[0].nbytes % 16
            require(small or tensor.data_ptr() % 16 == 0, "alignment", f"{name} is not 16-byte aligned")
        require((lse is not None) == return_lse, "lse", "lse and return_lse disagree")
        if lse is not None:
            require(lse.shape == plan.q_shape[:2] and lse.dtype is torch.float32, "lse-shape", tuple(lse.shape))
            require(lse.is_contiguous(), "lse-contiguous", lse.stride())
        keys, values = (paged_kv_cache if self._layout == "NHD" else paged_kv_cache.transpose(2, 3)).unbind(1)
        # A lazy stream's kernels run after later steps have written those slots.
        work = partial(plan.kernel, poison=not self._stream.lazy)
        self._stream.submit(lambda: work(plan.received[0], q, keys, values, out, lse))
        out.fill_(float("nan"))
        if not self._stream.lazy:
            self._stream.wait()


class DecodeDouble(_Wrapper):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(self, *, indptr: Tensor, indices: Tensor, last_page_len: Tensor, head_dim: int, **common: Any) -> None:
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._keep(Rows(one_each, indptr, indices, last_page_len), head_dim=head_dim, causal=False, **common)


class PrefillDouble(_Wrapper):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        head_dim_qk: int,
        causal: bool,
        **common: Any,
    ) -> None:
        rows = Rows(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(rows, head_dim=head_dim_qk, causal=causal, **common)


class FlashInferOverDouble(FlashInferAttention):
    """The driver over the double, on the CPU, for the dtypes and head sizes that it has on a GPU."""

    workspace_bytes = 2**24  # every new driver zeroes it
    lazy: ClassVar[bool] = False

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), devices=frozenset({"cpu"}))

    @classmethod
    def probe(cls) -> None:
        """Runs everywhere."""

    def _kernels(self) -> Kernels:
        self.stream = Stream(lazy=self.lazy)
        return Kernels(
            prefill=partial(PrefillDouble, self.stream),
            decode=partial(DecodeDouble, self.stream),
            event=partial(StreamEvent, self.stream),
            pin_memory=False,
        )


class LazyOverDouble(FlashInferOverDouble):
    """The same on a lazy stream: outputs are NaN until `stream.wait()`."""

    lazy = True


class AnySizeOverDouble(FlashInferOverDouble):
    """The same for any dtype and head size: models that are quick on a CPU are too small for the real kernels."""

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), dtypes=None, head_sizes=None)
