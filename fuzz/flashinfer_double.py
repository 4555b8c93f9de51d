"""A stand-in for FlashInfer's paged wrappers that computes right results on the CPU and forgives nothing.

The real wrappers check little: most mistakes in their metadata end as reads outside the cache, or as attention over
the wrong tokens. This one raises `ContractViolation` on all that we know of, whether the real one does or not, and is
as unhelpful as a device may be:

- Work runs late. `plan` submits the copies of its arrays and `run` its kernel to a `Stream`; what the caller does to
  the host's arrays before they are copied shows. A lazy stream waits until somebody synchronises.
- Outputs hold NaN until a kernel fills them, and slots after the end of a sequence hold NaN once it has run.
- Wrappers made for CUDA graphs read their fixed buffers at every run, as they are by then.

    backend = FlashInferOverDouble(spec)        # the driver, in every other respect as it is on a GPU
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from kvproof.attention import CacheSpec, Capabilities
from kvproof.attention.flashinfer import FlashInferAttention, FlashInferFA3, FlashInferPersistent
from kvproof.attention.flashinfer_package import Kernels
from kvproof.fuzz.flashinfer_stream import Stream
from kvproof.fuzz.flashinfer_wrappers import doubles


def make_spec(**changes: Any) -> CacheSpec:
    """A small cache that the driver takes."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "bfloat16",
        "num_blocks": 300,
        "block_size": 4,
    }
    return CacheSpec(**(fields | changes))


class FlashInferOnCPU(FlashInferAttention):
    """The driver on the CPU, for the dtypes and head sizes that it has on a GPU. What it drives is a subclass's."""

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), devices=frozenset({"cpu"}))

    @classmethod
    def probe(cls) -> None:
        """Runs everywhere."""


class FlashInferOverDouble(FlashInferOnCPU):
    """The driver over the double."""

    workspace_bytes = 2**24  # every new driver zeroes it
    lazy: ClassVar[bool] = False

    def _kernels(self) -> Kernels:
        self.stream = Stream(lazy=self.lazy)
        return doubles(self.stream)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """In the order of the stream, as on a device."""
        self.stream.submit(partial(self._write_at, self._tokens, layer, k, v))


class LazyOverDouble(FlashInferOverDouble):
    """The same on a lazy stream: outputs are NaN until `stream.wait()`."""

    lazy = True


class AnySizeOverDouble(FlashInferOverDouble):
    """The same for any dtype and head size: models that are quick on a CPU are too small for the real kernels."""

    @classmethod
    def capabilities(cls) -> Capabilities:
        return replace(super().capabilities(), dtypes=None, head_sizes=None)


class GraphsOverDouble(AnySizeOverDouble):
    """The same with CUDA graphs."""

    graph_sizes = (1, 2, 4, 8)


class CascadeOverDouble(FlashInferOverDouble):
    """The same with cascade from the shortest prefix on."""

    cascade_rows = 2
    cascade_tokens = 1


class LazyCascadeOverDouble(CascadeOverDouble):
    lazy = True


class LazyGraphsOverDouble(GraphsOverDouble):
    lazy = True


class FA3OverDouble(FlashInferOverDouble, FlashInferFA3):
    """The driver's FA3 variant."""


class PersistentOverDouble(FlashInferOverDouble, FlashInferPersistent):
    """The driver's variant on BatchAttention."""
