"""The entry point in ``sglang.srt.plugins``: SGLang calls ``register`` in each of its processes before it starts."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise

from scute_patches import sgl_kernel
from scute_sglang import options

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend ``scute`` and hook the few places of SGLang that it needs.

    With any other ``--lora-backend`` SGLang behaves as if Scute were not installed. If a hooked symbol is not what
    Scute was written for, nothing is hooked, and asking for the backend stops the start with one readable line.
    """
    # Before anything imports sgl_kernel: on a machine without CUDA it cannot load.
    sgl_kernel.install()
    from scute_patches.signatures import IncompatibleSGLangError
    from scute_sglang.compatibility import MODEL_SIGNATURES, check

    try:
        check()
    except IncompatibleSGLangError as error:
        refuse(error)
        return

    from sglang.srt.lora.backend.lora_registry import register_lora_backend

    from scute_patches import (
        decode_cuda_graph_runner,
        logits_processor,
        lora_registry,
        model_runner,
        schedule_batch,
        server_args,
        weight_updater,
    )

    @register_lora_backend(server_args.BACKEND)
    def create_scute_backend() -> type:
        from scute_sglang.backend import ScuteLoRABackend

        return ScuteLoRABackend

    def manager_class() -> type:
        check(MODEL_SIGNATURES)
        from scute_sglang.manager import ScuteLoRAManager

        return ScuteLoRAManager

    server_args.install(
        options.MEMORY_FLAG,
        options.MEMORY_VARIABLE,
        options.MEMORY_HELP,
        options.parse_bytes,
        options.DEFAULT_MAX_RANK,
    )
    model_runner.install(manager_class)
    decode_cuda_graph_runner.install()
    logits_processor.install()
    weight_updater.install()
    lora_registry.install()
    schedule_batch.install()


def refuse(error: Exception) -> None:
    """Stop this process if its command line asks for Scute, and have ``sglang.Engine`` fail with the same line; SGLang
    itself would only log a plugin's error and go on."""
    arguments = " ".join(sys.argv[1:]).replace("=", " ").split()
    if ("--lora-backend", "scute") in pairwise(arguments):
        sys.exit(f"scute-sglang: {error}")
    logger.warning("Scute is off: %s", error)
    from sglang.srt.lora.backend.lora_registry import register_lora_backend

    @register_lora_backend("scute")
    def create_scute_backend() -> type:
        raise error
