"""FlashInfer's paged attention as its documentation has it: metadata in CSR form in, attention in float64 out.

Stands in for the compiled kernels, under the double's wrappers and under the real package's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import log

import torch
from torch import Tensor


class ContractViolation(AssertionError):
    """A wrapper or kernel was used in a way that is wrong on a GPU. `rule` names what was broken."""

    def __init__(self, rule: str, detail: object) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


def require(holds: object, rule: str, detail: object) -> None:
    if not holds:
        raise ContractViolation(rule, detail)


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch's queries and pages, all int32: row r has queries qo_indptr[r] to qo_indptr[r+1] and so on."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor

    def arrays(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def clone(self) -> Rows:
        return Rows(**{name: array.clone() for name, array in self.arrays().items()})

    def check(self, page_size: int, *, causal: bool) -> None:
        """Raise `ContractViolation` unless the arrays describe rows that can be attended to.

        Of these rules the real package checks that indptr does not decrease, in one of its planners.
        """
        for name, array in self.arrays().items():
            require(array.dtype is torch.int32, "index-dtype", f"{name} is {array.dtype}")
            require(array.dim() == 1 and array.is_contiguous(), "index-contiguous", name)
        qo, kv, last = self.qo_indptr.tolist(), self.kv_indptr.tolist(), self.kv_last_page_len.tolist()
        require(len(qo) == len(kv) == len(last) + 1, "batch-size", f"{len(qo)} qo_indptr, {len(kv)}, {len(last)} rows")
        require(len(last) > 0, "empty-batch", "no rows")
        for name, indptr in (("qo_indptr", qo), ("kv_indptr", kv)):
            require(indptr[0] == 0, "indptr-start", f"{name} starts at {indptr[0]}")
            require(sorted(indptr) == indptr, "indptr-decreases", name)
        require(len(self.kv_indices) == kv[-1], "indices-length", f"{len(self.kv_indices)}, kv_indptr ends at {kv[-1]}")
        require(kv[-1] * page_size < 2**32, "token-index", "kernels number a batch's tokens in 32 bits")
        for row, used in enumerate(last):
            pages, queries = kv[row + 1] - kv[row], qo[row + 1] - qo[row]
            allowed = range(1, page_size + 1) if pages else range(1)
            require(used in allowed, "last-page-len", f"row {row} has {pages} pages and last_page_len {used}")
            length = max(pages - 1, 0) * page_size + used
            fits = queries <= length if causal or not pages else True
            require(fits, "query-len", f"row {row} has {queries} queries")


def attend(
    rows: Rows,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    causal: bool,
    window_left: int,
    soft_cap: float,
    scale: float,
) -> None:
    """Fill out, of q's shape [T, heads, head_dim], and lse [T, heads], base 2.

    keys and values are [pages, page_size, kv_heads, head_dim], q's tokens aligned to the end of each row's. Writes
    NaN into the slots after each row's end, so that a later reader of what was never written gives itself away.
    """
    qo, kv, indices, last = (array.tolist() for array in rows.arrays().values())
    num_pages, page_size, kv_heads, _ = keys.shape
    require(all(0 <= page < num_pages for page in indices), "page-range", f"a page that is not one of {num_pages}")
    for row, used in enumerate(last):
        pages, mine = indices[kv[row] : kv[row + 1]], slice(qo[row], qo[row + 1])
        if not pages:
            continue
        length = (len(pages) - 1) * page_size + used
        k, v = (
            x[pages].flatten(0, 1)[:length].double().repeat_interleave(q.shape[1] // kv_heads, dim=1)
            for x in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", q[mine].double(), k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at = torch.arange(length)
        query_at = at[length - scores.shape[1] :, None]
        seen = at <= query_at if causal else torch.ones(scores.shape[1:], dtype=torch.bool)
        if window_left >= 0:
            seen &= at >= query_at - window_left
        scores = scores.masked_fill(~seen, float("-inf"))
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
        if lse is not None:
            lse[mine] = (scores.logsumexp(-1) / log(2)).T.float()
        for x in (keys, values):
            x[pages[-1], used:] = float("nan")
