"""Our allocator inside vLLM; docs/vllm.md tells how.

    LLM(model, scheduler_cls="kvproof.backend.integrations.vllm.Scheduler")         our BlockManager
    LLM(model, scheduler_cls="kvproof.backend.integrations.vllm.AsyncScheduler")    the same, scheduling ahead
    LLM(model, scheduler_cls="kvproof.backend.integrations.vllm.PoolScheduler")     our pool below vLLM's own manager
    LLM(model, scheduler_cls="kvproof.backend.integrations.vllm.AsyncPoolScheduler")

Nothing of vLLM is imported before one of these is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AsyncPoolScheduler", "AsyncScheduler", "PoolScheduler", "Scheduler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvproof.backend.integrations.vllm import scheduler

    return getattr(scheduler, name)
