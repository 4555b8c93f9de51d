"""What `EngineMachine` has to notice: faults in the scheduler, in the plans of its steps, and in who reads them."""

from __future__ import annotations

from kvproof.backend.engine_backend import EngineBackend
from kvproof.backend.scheduler import Scheduler
from kvproof.fuzz.conformance.faults import METADATA_FAULTS
from kvproof.fuzz.machines.engine import EngineMachine
from kvproof.fuzz.planted import Fault


def _begin(name: str, old: str, new: str, why: str) -> Fault:
    return Fault(name, EngineBackend, "begin", old, new, why)


PLAN = "backend.plan(plan)"

REFUSED_PLANS = (
    _begin("slots one too high", PLAN, f"plan.slot_mapping.add_(1); {PLAN}", "slot_mapping, off by one"),
    _begin("last pages one too short", PLAN, f"plan.kv_last_page_len.sub_(1); {PLAN}", "last_page_len, off by one"),
    _begin("plan one position on", PLAN, f"plan.positions.add_(1); {PLAN}", "positions, off by one"),
    _begin("last block one too high", PLAN, f"plan.kv_indices[-1:].add_(1); {PLAN}", "a wrong block in kv_indices"),
)
"""An engine that builds a wrong plan: `BatchPlan.validate` refuses each before it can do harm."""

MISREAD_PLANS = tuple(fault for fault in METADATA_FAULTS if fault.backend.name == EngineMachine.attention)
"""The same behind `validate`: a backend that reads a valid plan wrongly, as nothing but the tokens can tell."""

ENGINE_FAULTS = (
    _begin(
        "first block one on",
        PLAN,
        "on = chunks[0].seq.num_computed >= self.spec.block_size\n"
        f"        plan.kv_indices[0].add_(on).remainder_(self.spec.num_blocks); {PLAN}",
        "a wrong block in kv_indices: where nobody writes it, no rule of the plan can know",
    ),
    _begin(
        "model one position back",
        "positions=self.attention.positions",
        "positions=(self.attention.positions - 1).clamp(min=0)",
        "positions, off by one, where the model embeds them",
    ),
    _begin(
        "no copy on write",
        "self.attention.copy_blocks(self.manager.take_copies())",
        "self.manager.take_copies()",
        "a fork goes on with what its new block held before",
    ),
    _begin(
        "a chunk from the end",
        "seq.tokens(seq.num_computed, seq.num_computed + n)",
        "seq.tokens(len(seq) - n, len(seq))",
        "the second chunk of a prompt is not where the first one ended",
    ),
    _begin("logits of the token before", "int(end) - 1", "max(0, int(end) - 2)", "qo_indptr, off by one"),
    Fault(
        "preempted with its blocks",
        Scheduler,
        "remove",
        "self.manager.release(request.seq)",
        "pass",
        "an aborted or preempted request keeps what it held",
    ),
    Fault(
        "a burst computes its prefix many times",
        Scheduler,
        "_admissions",
        "if computing and",
        "if False and",
        "no request waits for the block that another one computes",
    ),
    Fault(
        "scheduled before the hit is known",
        Scheduler,
        "_admissions",
        "min(_remaining(request), budget)",
        "min(len(request.seq), budget)",
        "a length that counts tokens which the prefix cache has (nano-vllm#211)",
    ),
    Fault(
        "blocks for the first chunk only",
        Scheduler,
        "_admissions",
        "self.manager.admit(request.seq)",
        "self.manager.admit(request.seq, budget)",
        "prompts are begun without the blocks to go on: two can wait for each other (vllm#44560)",
    ),
    Fault(
        "the victim computes in this step",
        Scheduler,
        "_decodes",
        "self._preempt(self.running[-1])",
        "work.append((self.running[-1], 1)); self._preempt(self.running[-1])",
        "a request is preempted that the step has already scheduled (vllm#23713)",
    ),
)
"""Faults of the engine's own that change tokens, leak blocks, or compute them twice."""
