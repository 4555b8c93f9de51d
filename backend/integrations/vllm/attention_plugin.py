"""What vLLM's entry point `vllm.general_plugins` calls, in every process: our attention backends are offered."""

from __future__ import annotations

import os

from kvproof.backend.integrations.vllm.errors import UnsupportedVllm

CHOICE = "KVPROOF_VLLM_ATTENTION"
"""The environment variable that names one of our backends, or "auto"."""

MODULE = "kvproof.backend.integrations.vllm.attention"


def register() -> None:
    """Offer our backends as CUSTOM; and where `KVPROOF_VLLM_ATTENTION` is set, in the place of CPU_ATTN too.

    On CUDA, `attention_config={"backend": "CUSTOM"}` then selects them. vLLM's CPU platform takes CPU_ATTN whatever is
    selected. May be called any number of times. Raises `UnsupportedVllm` for a version that is not on record, if the
    variable is set; else such a vLLM is left alone.
    """
    chosen = os.environ.get(CHOICE)
    try:
        from kvproof.backend.integrations.vllm.seam import AttentionBackendEnum, register_backend
    except UnsupportedVllm:
        if chosen:
            raise
        return
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{MODULE}.Backend")
    if chosen:
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{MODULE}.CPUBackend")
