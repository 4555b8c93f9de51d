"""`kvproof generate`: text from a model through the paged backend."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproof.allocator import InvalidArgument, InvariantViolation
from kvproof.cli.common import count, on_terminal

if TYPE_CHECKING:
    from kvproof.backend.llm import LLM, Completion
    from kvproof.backend.request import Request
    from kvproof.backend.sampling import SamplingParams

EXAMPLE = """\
example:
  kvproof generate --model smollm2 --chat --prompt "What is a page table?" "Name three rivers." --max-tokens 64
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text for prompts through the paged backend",
        description="Generate text for one or many prompts in one continuous batch.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="smollm2, a GGUF file, or a Hugging Face model folder")
    parser.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="prompts")
    parser.add_argument("--prompts-file", type=Path, metavar="FILE", help="more prompts, one a line")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt in the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, with --chat")
    parser.add_argument("--repeat", type=count, default=1, metavar="N", help="serve all prompts N times, in rounds")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=count, default=64, metavar="N", help="most new tokens (default 64)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest; 0 for all")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample within total probability P")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    sampling.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same text (default 0)")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--backend", default="auto", metavar="NAME", help="attention backend (see kvproof backends)")
    engine.add_argument("--runner", default="auto", metavar="NAME", help="model runner (see kvproof backends)")
    engine.add_argument("--policy", default="lru", metavar="NAME", help="eviction policy (default lru)")
    engine.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
    engine.add_argument("--block-size", type=count, default=16, metavar="B", help="token slots a block (default 16)")
    engine.add_argument("--num-blocks", type=count, metavar="N", help="blocks in the KV cache (default: 1 GiB)")
    engine.add_argument("--max-num-seqs", type=count, default=32, metavar="N", help="most running sequences")
    engine.add_argument(
        "--max-num-batched-tokens", type=count, default=512, metavar="N", help="most tokens a step (default 512)"
    )
    engine.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt in full")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    from kvproof.backend.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop=tuple(args.stop),
    )
    llm = _load(args)
    texts = [_chat(llm, prompt, args.system) if args.chat else prompt for prompt in prompts]
    report = _serve(llm, prompts, texts, params, args)
    if args.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    refused = [output for output in report.outputs if output["error"]]
    for output in refused:
        print(f"kvproof generate: error: refused {output['prompt'][:40]!r}: {output['error']}", file=sys.stderr)
    return 1 if refused else 0


@dataclass
class Report:
    outputs: list[dict[str, Any]]
    stats: dict[str, Any]


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt)
    if args.prompts_file is not None:
        try:
            lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"can't read the prompts file {args.prompts_file}: {error}") from None
        prompts += [line for line in lines if line.strip()]
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"prompt {prompt!r:.60} is not Unicode text") from None
    if not prompts:
        raise InvalidArgument("no prompt: give --prompt TEXT or --prompts-file FILE")
    if args.system is not None and not args.chat:
        raise InvalidArgument("--system needs --chat")
    return prompts


def _load(args: argparse.Namespace) -> LLM:
    from rich.progress import BarColumn, Progress, TextColumn

    from kvproof.backend.llm import LLM
    from kvproof.backend.selection import require_known

    require_known(args.backend)  # before minutes are spent on loading a model
    columns = (TextColumn("loading {task.fields[model]}"), BarColumn())
    with Progress(*columns, **on_terminal()) as bar:
        task = bar.add_task("", total=None, model=args.model)
        return LLM(
            args.model,
            dtype=args.dtype,
            runner=args.runner,
            backend=args.backend,
            policy=args.policy,
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            prefix_caching=not args.no_prefix_caching,
            seed=args.seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _chat(llm: LLM, prompt: str, system: str | None) -> str:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.tokenizer.chat([*messages, {"role": "user", "content": prompt}])


def _serve(llm: LLM, prompts: list[str], texts: list[str], params: SamplingParams, args: argparse.Namespace) -> Report:
    """Serve all rounds; afterwards nothing may be left behind."""
    engine, manager = llm.engine, llm.engine.manager
    outputs = []
    started = time.perf_counter()
    for round_number in range(1, args.repeat + 1):
        label = f"round {round_number} of {args.repeat}" if args.repeat > 1 else "generating"
        for prompt, completion in zip(prompts, _generate(llm, texts, params, label), strict=True):
            outputs.append({**asdict(completion), "prompt": prompt, "round": round_number})
    seconds = time.perf_counter() - started
    manager.check()
    if manager.num_used:
        raise InvariantViolation("I11", f"{manager.num_used} blocks are still referenced after the last request")
    stats = engine.stats
    return Report(
        outputs,
        {
            "blocks": {"total": manager.num_blocks, "peak_used": stats.peak_used_blocks, "free": manager.num_free},
            "block_size": manager.block_size,
            "prompt_tokens": stats.num_prompt_tokens,
            "prefix_hit_tokens": stats.num_prefix_hit_tokens,
            "output_tokens": stats.num_output_tokens,
            "preemptions": stats.num_preemptions,
            "steps": stats.num_steps,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(stats.num_output_tokens / seconds, 1),
            "backend": engine.backend.attention.name,
            "dtype": engine.backend.spec.dtype,
        },
    )


def _generate(llm: LLM, texts: list[str], params: SamplingParams, label: str) -> list[Completion]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, **on_terminal()) as bar:
        task = bar.add_task("", total=len(texts) * params.max_tokens)

        def on_token(request: Request) -> None:
            saved = params.max_tokens - request.num_output_tokens if request.finish_reason else 0
            bar.update(task, advance=1 + saved)

        return llm.generate(texts, params, on_token=on_token)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    for output in report.outputs:
        title = f"[{output['round']}] {output['prompt']}"
        out.print(Text(title, style="bold"), Text(f"  ({output['cached_tokens']} tokens cached)", style="dim"), sep="")
        out.print(Text(output["text"].strip() or output["error"] or "(no text)"))
        out.print()
    stats = report.stats
    blocks = stats["blocks"]
    out.print(
        f"{stats['output_tokens']} tokens in {stats['seconds']:.2f} s, {stats['tokens_per_second']} tokens a second "
        f"({stats['backend']} backend, {stats['dtype']})\n"
        f"prefix cache: {stats['prefix_hit_tokens']} of {stats['prompt_tokens']} prompt tokens found; "
        f"{stats['preemptions']} preemptions\n"
        f"blocks: {blocks['peak_used']} of {blocks['total']} used at the peak, {blocks['free']} free now; "
        "every invariant holds"
    )
