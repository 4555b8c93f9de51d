"""What the double's wrappers have in common: see `kvproof.fuzz.flashinfer_wrappers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvproof.fuzz.flashinfer_kernel import ContractViolation, Rows, attend, require
from kvproof.fuzz.flashinfer_stream import Stream

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Group sizes that the decode kernel without tensor cores has been compiled for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a wrapper remembers of `plan`, which is copied to the device by submission `copied`."""

    copied: int
    rows: Callable[[], Rows]  # what the device has of it when a kernel runs
    q_shape: tuple[int, int, int]
    page_shape: tuple[int, int, int]  # in the wrapper's layout
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    kernel: Callable[..., None]


class Wrapper:
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
        require(backend in ("fa2", "fa3"), "backend", f"{backend}: auto stays with what its first plan chose")
        self._stream, self._layout, self._tensor_cores = stream, kv_layout, use_tensor_cores
        self._workspace_bytes, self._backend = float_workspace_buffer.numel(), backend
        self._planned: Plan | None = None
        self._fixed: Rows | None = None  # the buffers of a wrapper for CUDA graphs
        self._scheduled: Rows | None = None  # what its schedule on the device was made for

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
        rows.check(page_size, causal=causal)
        group, remainder = divmod(num_qo_heads, num_kv_heads)
        require(remainder == 0, "group-size", f"{num_qo_heads} heads on {num_kv_heads}")
        require(self._tensor_cores or group in CUDA_CORE_GROUPS, "group-size", f"{group} without tensor cores")
        require(q_data_type is o_data_type, "dtype", f"{q_data_type}, {o_data_type}")
        mixed = kv_data_type is torch.float8_e4m3fn and self._backend == "fa2"
        require(kv_data_type is q_data_type or mixed, "dtype", f"{self._backend}: {q_data_type}, {kv_data_type}")
        require(self._backend == "fa2" or head_dim in (64, 128, 256), "head-size", f"{head_dim} with FA3")
        require(window_left >= -1, "window", window_left)
        require(logits_soft_cap >= 0, "soft-cap", logits_soft_cap)
        require(sm_scale > 0, "scale", sm_scale)
        require(non_blocking, "blocking-plan", "each array's copy would wait for the device")
        self._require_copied()
        num_queries = int(rows.qo_indptr[-1])
        needed = self._needed(num_queries, num_qo_heads, head_dim)
        if needed > self._workspace_bytes:
            raise RuntimeError(
                f"Buffer overflow when allocating memory for batch_prefill_tmp_v with size {needed} and alignment 16, "
                f"but only {self._workspace_bytes} bytes available in AlignedAllocator. Increase the workspace size."
            )
        page = (page_size, num_kv_heads) if self._layout == "NHD" else (num_kv_heads, page_size)
        copied, on_device = self._submit(rows)
        self._planned = Plan(
            copied=copied,
            rows=on_device,
            q_shape=(num_queries, num_qo_heads, head_dim),
            page_shape=(*page, head_dim),
            dtype=q_data_type,
            kv_dtype=kv_data_type,
            scale=sm_scale,
            kernel=partial(attend, causal=causal, window_left=window_left, soft_cap=logits_soft_cap),
        )

    @staticmethod
    def _needed(num_queries: int, num_qo_heads: int, head_dim: int) -> int:
        return 4 * num_qo_heads * (head_dim + 1) * num_queries

    def _submit(self, rows: Rows) -> tuple[int, Callable[[], Rows]]:
        """Submit the copy of a plan. Returns its number, and what the device's kernels find."""
        received, fixed = rows.clone(), self._fixed

        def copy() -> None:
            for name, array in rows.arrays().items():
                if fixed is None or array.data_ptr() != fixed.arrays()[name].data_ptr():
                    unchanged = torch.equal(array, received.arrays()[name])
                    require(unchanged, "overwritten", f"{name} was written between plan and its copy")
            if fixed is not None:
                for name, buffer in fixed.arrays().items():
                    buffer[: len(rows.arrays()[name])].copy_(rows.arrays()[name])
                self._scheduled = received

        copied = self._stream.submit(copy)
        return copied, (lambda: received) if fixed is None else self._in_buffers

    def _in_buffers(self) -> Rows:
        fixed, scheduled = self._fixed, self._scheduled
        if fixed is None or scheduled is None:
            raise ContractViolation("not-planned", "a graph ran before its wrapper's plan was copied")
        for name in ("kv_indptr", "kv_last_page_len"):
            same = torch.equal(fixed.arrays()[name], scheduled.arrays()[name])
            require(same, "stale-schedule", f"{name} is not what the wrapper's own schedule was made for")
        return replace(fixed, kv_indices=fixed.kv_indices[: int(fixed.kv_indptr[-1])])

    def _require_copied(self) -> None:
        last = self._planned
        copied = last is None or self._stream.done >= last.copied
        require(copied, "replanned-too-soon", "the wrapper's last schedule is still to be copied from its own memory")

    def run(
        self,
        *,
        q: Tensor,
        paged_kv_cache: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        dtypes = {"q": plan.dtype, "cache": plan.kv_dtype, "out": plan.dtype}
        for name, tensor in (("q", q), ("cache", paged_kv_cache), ("out", out)):
            require(tensor.dtype is dtypes[name], "dtype", f"{name} is {tensor.dtype}, planned {dtypes[name]}")
            # Kernels read 16 bytes at a time. Heads too small for that are only there to be quick.
            small = tensor[0].nbytes % 16
            require(small or tensor.data_ptr() % 16 == 0, "alignment", f"{name} is not 16-byte aligned")
        require((lse is not None) == return_lse, "lse", "lse and return_lse disagree")
        if lse is not None:
            require(lse.shape == plan.q_shape[:2] and lse.dtype is torch.float32, "lse-shape", tuple(lse.shape))
            require(lse.is_contiguous(), "lse-contiguous", lse.stride())
        keys, values = (paged_kv_cache if self._layout == "NHD" else paged_kv_cache.transpose(2, 3)).unbind(1)
        scaled = plan.kv_dtype is not plan.dtype
        for scale in (k_scale, v_scale):
            require((scale is not None) == scaled, "scales", f"{k_scale} and {v_scale} for a {plan.kv_dtype} cache")
        out.fill_(float("nan"))

        def kernel() -> None:
            plan.kernel(plan.rows(), q, keys, values, out, lse, scale=plan.scale * (k_scale or 1.0))
            if v_scale is not None:
                out.mul_(v_scale)  # the real one, too, does this to the rounded result

        self._stream.submit(kernel)
        self._stream.flush()
