"""What tests/gpu/run.sh runs. Prepared, and not run on a GPU yet.

Each check is one line of the table: what, ok or the first line of what went wrong, and the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec, Capabilities, DType
from kvproof.attention.flashinfer import FlashInferAttention, FlashInferFA3, FlashInferPersistent
from kvproof.attention.reference import ReferenceAttention
from kvproof.attention.torch_paged import TorchAttention
from kvproof.backend import Engine, ModelRunner, ModelSpec, SamplingParams, Step
from kvproof.backend.graphs import CudaGraph, GraphRunner
from kvproof.fuzz.conformance import check_attention_backend
from kvproof.fuzz.flashinfer_double import FA3OverDouble, FlashInferOverDouble, PersistentOverDouble
from kvproof.fuzz.flashinfer_stream import RecordedGraph

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
PEAK_BYTES = 4.8e12  # per second, of an H200's memory


@dataclass
class Settings:
    device: str
    flashinfer: type[FlashInferAttention]
    fa3: type[FlashInferAttention]
    persistent: type[FlashInferAttention]
    examples: int
    decodes: list[tuple[int, int]]  # (rows, context)
    prompt: int
    repeats: int


@dataclass
class Table:
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, what: str, check: Callable[[], str]) -> None:
        """Run a check; a failed one is a row too, so that one fault does not hide what comes after it."""
        started = time.perf_counter()
        try:
            result, figures = "ok", check()
        except Exception as error:
            result, figures = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0][:150]
        self.rows.append((what, result, figures))
        say(f"[{time.perf_counter() - started:6.1f} s] {what}: {result} {figures}")

    def show(self) -> None:
        say("")
        for what, result, figures in self.rows:
            say(f"{what:44} {result:7} {figures}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def environment(it: Settings) -> str:
    parts = [f"python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    if it.device == "cuda":
        import flashinfer

        parts += [torch.cuda.get_device_name(), f"flashinfer {flashinfer.__version__}"]
    return ", ".join(parts)


def narrow(backend: type[AttentionBackend], *features: str, **changes: Any) -> type[AttentionBackend]:
    """The backend for one dtype and head size and few features: each combination is compiled before it runs."""
    declared = {"dtypes": frozenset({"bfloat16"}), "head_sizes": frozenset({HEAD_SIZE})} | changes

    def capabilities(_: type) -> Capabilities:
        wide = backend.capabilities()
        kept = wide.features & {"custom_scale", "lse", *features}
        return replace(wide, features=kept, **declared)

    return type(f"Narrow{backend.__name__}", (backend,), {"capabilities": classmethod(capabilities)})


def conforms(it: Settings, backend: type[AttentionBackend]) -> str:
    """The conformance kit."""
    report = check_attention_backend(backend, examples=it.examples, device=it.device, shrink=False)
    if not report.passed:
        say(str(report))
        names = ", ".join(result.name for result in report.failures)
        raise AssertionError(f"{len(report.failures)} of {len(report.results)} checks: {names}")
    return f"{len(report.results)} checks, {it.examples} examples each"


class RandomModel:
    """Two layers of attention with random weights; its logits lie far apart, so that 16 bits are enough to agree."""

    def __init__(self, device: str, dtype: DType = "bfloat16") -> None:
        self.spec = ModelSpec(
            architecture="random",
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_size=64,
            vocab_size=64,
            max_length=128,
            dtype=dtype,
            device=device,
        )
        hidden, kv = 4 * 64, 2 * 64
        self._sizes = [hidden, kv, kv]
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, getattr(torch, dtype))

        self._tokens, self._positions = weight(64, hidden), weight(128, hidden)
        self._layers = [(weight(hidden, sum(self._sizes)), weight(hidden, hidden)) for _ in range(2)]

    def forward(self, step: Step) -> Tensor:
        x = self._tokens[step.token_ids] + self._positions[step.positions]
        for layer, (qkv, out) in enumerate(self._layers):
            x = torch.nn.functional.layer_norm(x, x.shape[-1:])
            q, k, v = (part.unflatten(-1, (-1, 64)) for part in torch.split(x @ qkv, self._sizes, dim=-1))
            x = x + step.attention(layer, q, k, v).flatten(-2) @ out
        return torch.nn.functional.layer_norm(x[step.logits_rows], x.shape[-1:]) @ self._tokens.T


def with_graphs(it: Settings) -> type[FlashInferAttention]:
    return type("WithGraphs", (it.flashinfer,), {"graph_sizes": (1, 2, 4, 8)})


def with_cascade(it: Settings) -> type[FlashInferAttention]:
    return type("WithCascade", (it.flashinfer,), {"cascade_rows": 2, "cascade_tokens": 1})


def replayed(model: ModelRunner, attention: AttentionBackend) -> ModelRunner:
    stream = getattr(attention, "stream", None)
    return GraphRunner(model, CudaGraph if stream is None else lambda: RecordedGraph(stream))


def generation(it: Settings) -> str:
    """First by graphs, then without, then by the other backends."""
    model = RandomModel(it.device)
    outputs = []
    for backend in (with_graphs(it), it.flashinfer, TorchAttention, ReferenceAttention):
        attention = backend(model.spec.cache_spec(num_blocks=24, block_size=BLOCK_SIZE))
        engine = Engine(
            replayed(model, attention) if attention.graph_sizes else model,
            num_blocks=24,
            block_size=BLOCK_SIZE,
            attention=attention,
            max_num_seqs=4,
            max_num_batched_tokens=24,
        )
        prompts = [list(range(40)), [*range(32), 7, 7], [5], [9, 3] * 20, list(range(30, 60))]
        requests = [engine.add(prompt, SamplingParams(max_tokens=24)) for prompt in prompts]
        for _ in engine.run():
            pass
        outputs.append([tuple(request.output_token_ids) for request in requests])
    same = [[ours == right for ours, right in zip(output, outputs[-1], strict=True)].count(True) for output in outputs]
    figures = f"with graphs {same[0]} requests equal of {same[3]}, without {same[1]}, torch {same[2]}"
    if min(same[:2]) < same[3]:
        raise AssertionError(figures)
    return figures


def seconds(it: Settings, call: Callable[[], object]) -> float:
    """Of one call, on the device: the best of three series."""
    series = []
    for _ in range(3):
        call()
        synchronise(it)
        started = time.perf_counter()
        for _ in range(it.repeats):
            call()
        synchronise(it)
        series.append((time.perf_counter() - started) / it.repeats)
    return min(series)


def synchronise(it: Settings) -> None:
    if it.device == "cuda":
        torch.cuda.synchronize()


def planned(it: Settings, rows: int, context: int, query: int) -> tuple[FlashInferAttention, BatchPlan, list[Tensor]]:
    blocks = -(-context // BLOCK_SIZE)
    spec = CacheSpec(
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        dtype="bfloat16",
        device=it.device,
        num_blocks=rows * blocks,
        block_size=BLOCK_SIZE,
    )
    backend = it.flashinfer(spec)
    order = torch.randperm(rows * blocks).tolist()
    tables = [array("i", order[row * blocks : (row + 1) * blocks]) for row in range(rows)]
    batch = BatchPlan.build(tables, [context] * rows, [query] * rows, BLOCK_SIZE)
    backend.plan(batch)
    shapes = [(rows * query, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return backend, batch, [torch.randn(shape, dtype=torch.bfloat16, device=it.device) for shape in shapes]


def decode_speed(it: Settings, rows: int, context: int) -> str:
    """The wrapper alone; our `run`, which also writes the step's keys and values; our `plan` of the step."""
    backend, batch, (q, k, v) = planned(it, rows, context, 1)
    out = torch.empty_like(q)
    lane = backend._lanes[-1]
    alone = seconds(it, lambda: lane._decode.run(q=q, paged_kv_cache=backend.cache[0], out=out))
    ours = seconds(it, lambda: backend.run(0, q, k, v))
    plan = seconds(it, lambda: backend.plan(batch))
    rate = rows * context * 2 * KV_HEADS * HEAD_SIZE * 2 / alone
    return (
        f"wrapper {alone * 1e6:8.1f} us ({rate / 1e12:.2f} TB/s, {rate / PEAK_BYTES:4.0%} of peak), "
        f"run {ours * 1e6:8.1f} us ({ours / alone - 1:+.0%}), plan {plan * 1e6:6.1f} us"
    )


def prefill_speed(it: Settings) -> str:
    backend, _, (q, k, v) = planned(it, 1, it.prompt, it.prompt)
    ours = seconds(it, lambda: backend.run(0, q, k, v))
    return f"{ours * 1e3:.2f} ms, {2 * it.prompt**2 * HEADS * HEAD_SIZE / ours / 1e12:.0f} TFLOP/s"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--double", action="store_true", help="rehearse on the CPU; its figures mean nothing")
    parser.add_argument("--variants", action="store_true", help="windows, caps, other sizes: each is compiled first")
    options = parser.parse_args()
    if options.double:
        torch.set_num_threads(1)
        it = Settings("cpu", FlashInferOverDouble, FA3OverDouble, PersistentOverDouble, 2, [(1, 64), (4, 32)], 64, 1)
    else:
        grid = [(rows, context) for rows in (1, 16, 64, 256) for context in (1024, 4096, 16384)]
        it = Settings("cuda", FlashInferAttention, FlashInferFA3, FlashInferPersistent, 25, grid, 8192, 50)
    table = Table()
    table.add("environment", lambda: environment(it))
    kits = {
        "flashinfer": narrow(it.flashinfer),
        "torch": TorchAttention,
        "flashinfer, padded for graphs": narrow(with_graphs(it)),
        "flashinfer, cascade": narrow(with_cascade(it)),
    }
    if options.variants:
        kits |= {
            "flashinfer-fa3": narrow(it.fa3),
            "flashinfer-persistent": narrow(it.persistent),
            "flashinfer, 8-bit cache": narrow(it.flashinfer, "fp8_cache"),
            "flashinfer, window": narrow(it.flashinfer, "window"),
            "flashinfer, soft cap": narrow(it.flashinfer, "soft_cap"),
            "flashinfer, float16": narrow(it.flashinfer, dtypes=frozenset({"float16"})),
            "flashinfer, head size 64": narrow(it.flashinfer, head_sizes=frozenset({64})),
            "flashinfer, head size 256": narrow(it.flashinfer, head_sizes=frozenset({256})),
        }
    for name, backend in kits.items():
        table.add(f"conformance of {name}", lambda backend=backend: conforms(it, backend))
    table.add("generation equals the reference's", lambda: generation(it))
    for rows, context in it.decodes:
        table.add(f"decode, {rows} rows of {context}", lambda r=rows, c=context: decode_speed(it, r, c))
    table.add(f"prefill, {it.prompt} tokens", lambda: prefill_speed(it))
    table.show()
    return int(any(result != "ok" for _, result, _ in table.rows))


if __name__ == "__main__":
    sys.exit(main())
