"""vLLM's schedulers without a model: requests, steps, and a worker that remembers what it wrote.

Runs where vLLM is installed. The worker's memory holds, for every slot, all the tokens that the KV there was computed
from, as real KV does: whoever reads a slot that was written by or for somebody else sees it.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

HASH = get_hash_fn_by_name("sha256")  # vLLM's default
init_none_hash(HASH)

VOCABULARY = 3
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 200_000,
    "max_position_embeddings": 2**20, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What an engine is configured with. `windows` has one entry for each group of layers, None for full attention."""

    num_blocks: int = 20
    block_size: int = 4
    max_model_len: int = 64
    max_batched_tokens: int = 32
    max_seqs: int = 8
    windows: tuple[int | None, ...] = (None,)
    caching: bool = True
    whole_prompt_must_fit: bool = True
    watermark: float = 0.0
    policy: str = "fcfs"
    long_prefill: int = 0
    num_drafts: int = 0
    eagle: bool = False
    asynchronous: bool = False
    events: bool = False


class Drafter:
    """A `SpeculativeConfig` as far as schedulers ask it. With `eagle` it drafts with KV of its own, in extra slots."""

    num_speculative_tokens_per_batch_size = None
    max_num_new_slots_for_drafting = 0

    def __init__(self, num_speculative_tokens: int, eagle: bool) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._eagle = eagle

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda: self._eagle and name in ("use_eagle", "use_eagle_block_drop")


@cache
def model_config(max_model_len: int) -> ModelConfig:
    """A model's configuration; there are no weights."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len)


def make(scheduler_class: Callable[..., Any], shape: Shape) -> Any:
    """A scheduler of that class for an engine of that shape."""
    config = VllmConfig(
        model_config=model_config(shape.max_model_len),
        cache_config=CacheConfig(block_size=shape.block_size, enable_prefix_caching=shape.caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.max_seqs,
            max_num_batched_tokens=shape.max_batched_tokens,
            max_model_len=shape.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=shape.policy,
            long_prefill_token_threshold=shape.long_prefill,
            watermark=shape.watermark,
            scheduler_reserve_full_isl=shape.whole_prompt_must_fit,
            async_scheduling=shape.asynchronous,
        ),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if shape.events else None,
    )
    if shape.num_drafts:
        # Whose drafter it is, a scheduler does not ask; a real one would want a model's files.
        config.speculative_config = Drafter(shape.num_drafts, shape.eagle)
    size = {"block_size": shape.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**size) if window is None else SlidingWindowSpec(**size, sliding_window=window)
        for window in shape.windows
    ]
    register_all_kvcache_specs(config)
    config.cache_config.num_gpu_blocks = shape.num_blocks
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=shape.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=shape.block_size,
        log_stats=True,
    )


class _Request(Request):  # type: ignore[misc]  # vLLM has no types here
    """Its multimodal inputs count for the identity of blocks, and need no encoder: there is none."""

    has_encoder_inputs = False


@dataclass(frozen=True)
class Ask:
    """A request: what its KV depends on, and how long it goes on."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int = 4
    salt: str | None = None
    adapter: str | None = None
    media: tuple[tuple[str, int, int], ...] = ()
    reads_cache: bool = True
    priority: int = 0

    def request(self, shape: Shape) -> Request:
        """It, as a scheduler takes it."""
        features = [
            MultiModalFeatureSpec(None, "image", key, PlaceholderRange(offset=start, length=length))
            for key, start, length in self.media
        ]
        return _Request(
            self.name,
            list(self.prompt),
            SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, skip_reading_prefix_cache=not self.reads_cache),
            None,
            arrival_time=float(self.name),
            priority=self.priority,
            cache_salt=self.salt,
            mm_features=features,
            lora_request=None if self.adapter is None else LoRARequest(self.adapter, 1, f"/{self.adapter}"),
            block_hasher=get_request_block_hasher(shape.block_size, HASH) if shape.caching else None,
        )

    def next_token(self, position: int) -> int:
        """What the model samples there: the same whenever and wherever it is computed."""
        return (sum(self.prompt) + 7 * position * position + position // 3) % VOCABULARY

    def draft(self, position: int, n: int) -> list[int]:
        """What a drafter proposes from there: right at first, wrong from some place on."""
        right = (sum(self.prompt) + position) % (n + 1)
        return [(self.next_token(position + i) + (i >= right)) % VOCABULARY for i in range(n)]

    def content(self, position: int) -> tuple[Any, ...]:
        """What the KV there depends on beside the tokens."""
        return self.salt, self.adapter, tuple(item for item in self.media if item[1] <= position)


class WrongRead(AssertionError):
    """A step read a slot that does not hold what was computed for its request."""


@dataclass
class Worker:
    """Follows the scheduler's orders as vLLM's model runner does, one group, and checks every slot that it reads."""

    shape: Shape
    asks: dict[str, Ask] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], tuple[Any, ...]] = field(default_factory=dict)

    def execute(self, output: Any) -> ModelRunnerOutput:
        """One step: all its KV is written, then read, and tokens are sampled."""
        self._follow(output)
        scheduled = list(output.num_scheduled_tokens.items())
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        for name, n in scheduled:
            self._write(name, starts[name], n, drafts.get(name, []))
        for name, n in scheduled:
            self._read(name, starts[name], starts[name] + n, drafts.get(name, []))
        sampled = [self._sample(name, starts[name] + n, drafts.get(name, [])) for name, n in scheduled]
        names = [name for name, _ in scheduled]
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
        )

    def _follow(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            self.tokens[new.req_id] = list(new.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(table) for table in blocks]
            elif blocks is not None:
                for table, more in zip(self.tables[name], blocks, strict=True):
                    table.extend(more)
            if name in cached.all_token_ids:
                self.tokens[name] = list(cached.all_token_ids[name])

    def _kv(self, name: str, position: int, drafts: list[int]) -> tuple[Any, ...]:
        tokens = self.tokens[name] + drafts
        return self.asks[name].content(position), tuple(tokens[: position + 1])

    def _slot(self, name: str, group: int, position: int) -> tuple[int, int, int]:
        return group, self.tables[name][group][position // self.shape.block_size], position % self.shape.block_size

    def _write(self, name: str, start: int, n: int, drafts: list[int]) -> None:
        # EAGLE's drafter writes KV of its own behind the step's tokens.
        lookahead = min(self.shape.num_drafts, self.shape.max_model_len - start - n) if self.shape.eagle else 0
        for position in range(start, start + n + lookahead):
            for group in range(len(self.shape.windows)):
                slot = self._slot(name, group, position)
                if slot[1] == 0:
                    raise WrongRead(f"request {name} writes token {position} into the null block")
                self.memory[slot] = self._kv(name, position, drafts) if position < start + n else ("drafted",)

    def _read(self, name: str, start: int, stop: int, drafts: list[int]) -> None:
        for group, window in enumerate(self.shape.windows):
            for position in range(0 if window is None else max(0, start - window + 1), stop):
                slot = self._slot(name, group, position)
                found, right = self.memory.get(slot), self._kv(name, position, drafts)
                if found != right:
                    raise WrongRead(f"request {name}, token {position}, slot {slot}: {found} is not {right}")

    def _sample(self, name: str, computed: int, drafts: list[int]) -> list[int]:
        tokens = self.tokens[name]
        if computed < len(tokens) + len(drafts):
            return []  # a chunk of the prompt
        sampled: list[int] = []
        for draft in [*drafts, None]:
            sampled.append(self.asks[name].next_token(len(tokens) + len(sampled)))
            if draft != sampled[-1]:
                break
        tokens += sampled
        return sampled


class Engine:
    """A scheduler and its worker. With asynchronous scheduling, each step is scheduled before the last one has run."""

    def __init__(self, scheduler_class: Callable[..., Any], shape: Shape) -> None:
        self.shape = shape
        self.scheduler = make(scheduler_class, shape)
        self.worker = Worker(shape)
        self.in_flight: deque[Any] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}
        self.stats: list[Any] = []
        self.prefills: dict[str, Any] = {}
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher = SimpleNamespace(
            publish=lambda batch: self.events.extend(batch.events), shutdown=lambda: None
        )

    def add(self, ask: Ask) -> None:
        self.worker.asks[ask.name] = ask
        self.outputs[ask.name] = []
        self.scheduler.add_request(ask.request(self.shape))

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedule a step, and run what has to run by then. Returns what was scheduled, as plain data."""
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        while len(self.in_flight) > (1 if self.shape.asynchronous else 0):
            self.finish_step()
        cached = output.scheduled_cached_reqs
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self.hits |= started
        resumed = {name: n for name, n in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
                   if name in cached.resumed_req_ids}  # fmt: skip
        return {
            "scheduled": dict(output.num_scheduled_tokens),
            "hits of new requests": started,
            "hits of resumed requests": resumed,
            "preempted": sorted(output.preempted_req_ids or ()),
            "usage": round(self.scheduler.kv_cache_manager.usage, 9),
        }

    def finish_step(self) -> None:
        """The oldest step in flight runs, and the scheduler hears of it."""
        output = self.in_flight.popleft()
        result = self.worker.execute(output)
        for answers in self.scheduler.update_from_output(output, result).values():
            for answer in answers.outputs:
                self.outputs[answer.request_id] += answer.new_token_ids
                if answer.prefill_stats is not None:
                    self.prefills[answer.request_id] = answer.prefill_stats
            if answers.scheduler_stats is not None:
                self.stats.append(answers.scheduler_stats)
        if self.shape.num_drafts and not self.shape.asynchronous:
            alive = [name for name in result.req_ids if name in self.scheduler.requests and
                     result.sampled_token_ids[result.req_id_to_index[name]]]  # fmt: skip
            drafts = [
                self.worker.asks[name].draft(len(self.worker.tokens[name]), self.shape.num_drafts) for name in alive
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(alive, drafts))

    def run_dry(self, max_steps: int = 400) -> None:
        """Until every request has finished."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                while self.in_flight:
                    self.finish_step()
                return
            self.step()
        left = [(name, request.num_tokens, str(request.status)) for name, request in self.scheduler.requests.items()]
        raise AssertionError(f"after {max_steps} steps there are left: {left}, {self.shape}, {type(self.scheduler)}")
