"""What of vLLM the integration stands on, recorded for each version, and what has moved since.

Nothing here imports vLLM: sources are read, so that a release can be looked at without being installed.

    python -m kvproof.backend.integrations.vllm.contract [FOLDER]            what has moved, exit code 1 if anything has
    python -m kvproof.backend.integrations.vllm.contract --record [FOLDER]   record FOLDER's version in contract.json

FOLDER is a `vllm` package, such as one from an unpacked wheel; by default the installed one.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvproof.backend.integrations.vllm.errors import UnsupportedVllm

FORCE = "KVPROOF_VLLM_UNTESTED"
"""The environment variable that lets unrecorded versions through, with a warning that names what has moved."""

RECORD = Path(__file__).with_name("contract.json")

SIGNATURES = {
    # what our schedulers extend
    "v1/core/sched/scheduler.py:Scheduler.__init__": "builds the KV-cache manager, which ours replaces after it",
    "v1/core/sched/scheduler.py:Scheduler.add_request": "the first that a scheduler sees of a request",
    "v1/core/sched/async_scheduler.py:AsyncScheduler.__init__": "as Scheduler's",
    # what our manager answers in the place of
    "v1/core/kv_cache_manager.py:KVCacheManager.allocate_slots": "None: no blocks, and nothing has changed",
    "v1/core/kv_cache_manager.py:KVCacheManager.get_computed_blocks": "hits, tokens, a boundary for sparse groups",
    "v1/core/kv_cache_manager.py:KVCacheManager.get_blocks": "all blocks of a request, for the worker",
    "v1/core/kv_cache_manager.py:KVCacheManager.free": "a request has finished, or is preempted",
    "v1/core/kv_cache_manager.py:KVCacheManager.pop_blocks_for_free": "as free, but the blocks are given back later",
    "v1/core/kv_cache_manager.py:KVCacheManager.cache_blocks": "so many tokens of a request are known and computed",
    "v1/core/kv_cache_manager.py:KVCacheManager.estimate_cached_tokens": "tokens of a request that are findable",
    "v1/core/kv_cache_manager.py:KVCacheManager.record_prefix_cache_stats": "once for each admission that looked",
    "v1/core/kv_cache_manager.py:KVCacheManager.make_prefix_cache_stats": "since the last call; None without log_stats",
    "v1/core/kv_cache_manager.py:KVCacheManager.reset_prefix_cache": "False while blocks are in use",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_events": "since the last call",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_new_block_ids": "blocks that the worker must zero",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_kv_cache_block_copies": "copies on write, only for partial hits",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_boundary_state_offloads": "only for Mamba",
    "v1/core/kv_cache_manager.py:KVCacheManager.new_step_starts": "the first call of a scheduler step",
    "v1/core/kv_cache_manager.py:KVCacheBlocks.get_block_ids": "one list for each group; None if allowed and all empty",
    # what our pool overrides and leans on
    "v1/core/block_pool.py:BlockPool.__init__": "blocks, free_block_queue, cached_block_hash_to_block, null_block",
    "v1/core/block_pool.py:BlockPool.get_new_blocks": "referenced once, their content gone; ValueError for too many",
    "v1/core/block_pool.py:BlockPool.touch": "one reference more on each",
    "v1/core/block_pool.py:BlockPool.free_blocks": "one reference less on each, the first is reused first",
    "v1/core/block_pool.py:BlockPool.reset_prefix_cache": "False while blocks are in use",
    "v1/core/block_pool.py:BlockPool.get_num_free_blocks": "unreferenced blocks, cached ones included",
    "v1/core/block_pool.py:BlockPool.unpin_blocks": "give up references to blocks that are read until they are reused",
    "v1/core/block_pool.py:BlockPool._maybe_evict_cached_block": "drop a block's content, with its events",
    "v1/core/block_pool.py:BlockPool._remove_cached_block_hashes": "pops a block's keys and resets its hash",
    "v1/core/kv_cache_utils.py:KVCacheBlock.set_block_hash": "a block becomes findable",
    "v1/core/kv_cache_utils.py:KVCacheBlock.reset_hash": "a block is findable no longer",
    # what we call
    "v1/core/kv_cache_utils.py:generate_block_hash_extra_keys": "what tells a block's content apart, beside its tokens",
    "v1/core/kv_cache_utils.py:maybe_convert_block_hash": "a block hash as events carry it",
    "v1/kv_cache_interface.py:get_kv_cache_spec_kind": "a group's kind, as events carry it",
    "v1/kv_cache_interface.py:get_kv_cache_spec_sliding_window": "a group's window, as events carry it",
    "v1/kv_cache_interface.py:SlidingWindowSpec.max_admission_blocks_per_request": "what a request holds at most",
    "v1/metrics/stats.py:PrefixCacheStats.record": "one admission",
}
"""Functions and methods, and what they mean to us."""

FIELDS = {
    "v1/request.py:Request": (
        "request_id", "status", "num_computed_tokens", "num_prompt_tokens", "num_preemptions", "num_in_flight_tokens",
        "all_token_ids", "block_hashes", "_block_hasher", "cache_salt", "lora_request", "mm_features",
        "skip_reading_prefix_cache", "num_tokens", "is_finished", "session_id",
    ),
    "v1/core/kv_cache_utils.py:KVCacheBlock": (
        "block_id", "ref_cnt", "pool", "is_null", "block_hash", "block_hash_num_tokens",
    ),
    "v1/core/sched/scheduler.py:Scheduler": (
        "kv_cache_manager", "kv_cache_config", "vllm_config", "max_model_len", "block_size", "hash_block_size",
        "use_eagle_block_drop", "num_prefill_lookahead", "enable_kv_cache_events", "log_stats", "kv_metrics_collector",
        "dcp_world_size", "pcp_world_size", "is_encoder_decoder", "scheduler_config", "cache_config",
    ),
    "v1/core/kv_cache_manager.py:KVCacheManager": (
        "block_pool", "coordinator", "empty_kv_cache_blocks", "usage", "watermark_blocks",
    ),
    "v1/core/kv_cache_coordinator.py:KVCacheCoordinator": ("block_pool", "single_type_managers"),
    "v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager": (
        "block_pool", "block_size", "kv_cache_spec", "_null_block",
    ),
    "v1/kv_cache_interface.py:KVCacheConfig": ("num_blocks", "kv_cache_groups", "needs_kv_cache_zeroing"),
    "v1/core/block_pool.py:BlockPool": (
        "blocks", "free_block_queue", "cached_block_hash_to_block", "null_block", "kv_event_queue", "enable_caching",
        "hash_block_size", "enable_kv_cache_events", "metrics_collector", "medium", "_reuse_watchers",
    ),
    "distributed/kv_events.py:BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "session_id",
    ),
    "distributed/kv_events.py:BlockRemoved": ("block_hashes", "medium", "group_idx"),
}  # fmt: skip
"""Classes, and the fields of theirs that we read, write or fill in."""

ASKERS = ("v1/core/sched/scheduler.py", "v1/core/sched/async_scheduler.py", "v1/engine/core.py")
"""Who asks things of a KV-cache manager. What they ask is recorded too."""

UNREACHED = {
    "coordinator.get_num_blocks_to_allocate": "KV connectors",
    "evict_blocks": "KV connectors",
    "finalize_partial_tail_offloads": "KV connectors",
    "get_block_ids_for_computed_tokens": "KV connectors",
    "get_computed_blocks_for_connector": "KV connectors",
    "get_zeroing_block_ids_in_range": "KV connectors",
    "record_blocks_for_zeroing": "KV connectors",
    "remove_skipped_blocks": "KV connectors",
    "truncate_computed_blocks": "KV connectors",
    "empty_kv_cache_blocks.blocks": "KV connectors",
}
"""What is asked only on behalf of a feature that ours refuses at start, and does not answer."""


def minor(version: str) -> str:
    """The part of a version that the record goes by: "0.32" of "0.32.0+cpu"."""
    return ".".join(version.split(".")[:2])


@cache
def recorded() -> dict[str, dict[str, str]]:
    """The surface of each known version, oldest first."""
    record: dict[str, dict[str, str]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def require_known(version: str) -> None:
    """Raise `UnsupportedVllm` for a version that is not on record, unless `FORCE` is set: then warn of what moved."""
    if minor(version) in recorded():
        return
    known = ", ".join(recorded())
    if os.environ.get(FORCE) != "1":
        raise UnsupportedVllm(f"vLLM {version} is not among the tested versions {known}; {FORCE}=1 tries it anyway")
    moved = "; ".join(drift(installed())) or "nothing that we know of has moved"
    warnings.warn(f"vLLM {version} is untested, known are {known}: {moved}", RuntimeWarning, stacklevel=2)


def installed() -> Path:
    """The folder of the installed vLLM, which is not imported. Raises `UnsupportedVllm` where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedVllm("vLLM is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def version_of(folder: Path) -> str:
    """The version of the vLLM in `folder`."""
    for node in _parse(folder / "_version.py").body:
        if isinstance(node, ast.Assign) and "version" in [ast.unparse(target) for target in node.targets]:
            return str(ast.literal_eval(node.value))
    raise UnsupportedVllm(f"{folder / '_version.py'} tells no version")


def drift(folder: Path) -> list[str]:
    """What is not as recorded: for the version in `folder` if that is known, else for the newest known one."""
    record = recorded()
    version = minor(version_of(folder))
    known = record.get(version) or record[list(record)[-1]]
    found = surface(folder)
    moved = []
    for name in dict.fromkeys([*known, *found]):
        before, now = known.get(name, "nothing"), found.get(name, "nothing")
        if before != now:
            moved.append(f"{name} was {before} and is {now}")
    return moved


def surface(folder: Path) -> dict[str, str]:
    """All that we touch of the vLLM in `folder`, as text that can be compared."""
    found = {name: _signature(folder, name) for name in SIGNATURES}
    found |= {f"{name}.{field}": _presence(folder, name, field) for name, fields in FIELDS.items() for field in fields}
    return found | {f"asked: {name}": where for name, where in asked(folder).items()}


def asked(folder: Path) -> dict[str, str]:
    """What vLLM's schedulers and engine ask of a KV-cache manager, dotted, with the files that do."""
    names: dict[str, set[str]] = {}
    for file in ASKERS:
        tree = _parse(folder / file)
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                chain = _chain(node)
                for manager in ("kv_cache_manager", "cache_manager"):
                    if manager in chain[:-1]:
                        names.setdefault(".".join(chain[chain.index(manager) + 1 :][:2]), set()).add(file)
    return {name: ", ".join(sorted(names[name])) for name in sorted(names)}


def _chain(node: ast.expr) -> list[str]:
    """The names of a dotted expression."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _signature(folder: Path, name: str) -> str:
    file, _, path = name.partition(":")
    found = _find(folder / file, path.split("."))
    if not isinstance(found, ast.FunctionDef):
        return "missing"
    arguments = found.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def _presence(folder: Path, name: str, field: str) -> str:
    file, _, path = name.partition(":")
    found = _find(folder / file, [path])
    return "there" if isinstance(found, ast.ClassDef) and field in set(_fields(found)) else "missing"


def _fields(found: ast.ClassDef) -> Iterator[str]:
    """What a class declares, defines, and sets on itself in its methods."""
    yield from (ast.unparse(target) for node in found.body if isinstance(node, ast.Assign) for target in node.targets)
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _find(file: Path, path: list[str]) -> ast.stmt | None:
    body, found = _parse(file).body, None
    for name in path:
        found = next(
            (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name), None
        )
        body = found.body if found is not None else []
    return found


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare a vLLM with the record of what we touch of it.")
    parser.add_argument("folder", nargs="?", type=Path, help="a vllm package; by default the installed one")
    parser.add_argument("--record", action="store_true", help="record its version, or record it anew")
    args = parser.parse_args(arguments)
    folder = args.folder or installed()
    version = version_of(folder)
    if args.record:
        record = (recorded() if RECORD.exists() else {}) | {minor(version): surface(folder)}
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"recorded vLLM {version}\n")
        return 0
    moved = drift(folder)
    sys.stdout.write(f"vLLM {version}: {len(moved)} moved\n" + "".join(f"  {line}\n" for line in moved))
    return 1 if moved else 0


if __name__ == "__main__":
    raise SystemExit(main())
