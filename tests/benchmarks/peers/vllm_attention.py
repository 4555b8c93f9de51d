"""vLLM's decode attention on the CPU, timed by the interpreter that vLLM is installed in.

    $KVPROOF_VLLM_PYTHON tests/benchmarks/peers/vllm_attention.py '{"seq_lens": [...], "num_layers": 5, "threads": 2}'

First a line is printed with vLLM's version and the instruction set its kernel chose; then each line of standard input
asks for one round through all layers, answered by its seconds. 9 query and 3 key heads of 64, bfloat16, in blocks of
32: vLLM's fastest kernel needs a multiple of that. As in ours, a layer first writes the step's keys and values.
"""

from __future__ import annotations

import json
import random
import sys
from time import perf_counter

answers, sys.stdout = sys.stdout, sys.stderr  # whatever vLLM prints is no answer

import torch  # noqa: E402
import vllm  # noqa: E402
import vllm._custom_ops as ops  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402

BLOCK = 32


@torch.inference_mode()
def serve(seq_lens: list[int], num_layers: int, threads: int) -> None:
    vllm.platforms.current_platform.import_kernels()
    torch.set_num_threads(threads)
    isa = _get_attn_isa(torch.bfloat16, BLOCK, 64)
    if isa == "amx" and not torch.cpu._init_amx():
        isa = "vec"
    print(json.dumps({"version": vllm.__version__, "isa": isa}), file=answers, flush=True)
    rows, lengths = len(seq_lens), torch.tensor(seq_lens, dtype=torch.int32)
    counts = [-(-length // BLOCK) for length in seq_lens]
    blocks = iter(random.Random(1).sample(range(sum(counts)), sum(counts)))
    table = torch.zeros(rows, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(blocks) for _ in range(count)])
    last = lengths - 1
    slots = (table[torch.arange(rows), last // BLOCK] * BLOCK + last % BLOCK).long()
    cache = torch.randn(sum(counts), 3, 2 * BLOCK, 64).bfloat16().repeat(num_layers, 1, 1, 1, 1)
    q = torch.randn(rows, 9, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, rows, 3, 64, dtype=torch.bfloat16)
    start = torch.arange(rows + 1, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=rows,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=start,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    for _ in sys.stdin:
        started = perf_counter()
        for layer in cache:
            keys, values = layer.chunk(2, dim=2)
            out = torch.empty_like(q)
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)
            ops.cpu_attention_with_kv_cache(
                query=q,
                key_cache=keys,
                value_cache=values,
                output=out,
                query_start_loc=start,
                seq_lens=lengths,
                scale=0.125,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=table,
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
            )
        print(perf_counter() - started, file=answers, flush=True)


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
