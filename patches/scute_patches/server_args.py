"""``sglang.srt.server_args`` and ``sglang.srt.arg_groups.lora_hook``: the backend's name and options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

BACKEND = "scute"


def install(
    memory_flag: str, memory_variable: str, memory_help: str, parse_bytes: Callable[[str], int], default_max_rank: int
) -> None:
    """Offer ``--lora-backend scute`` and the memory option, and let the backend start without declared shapes.

    The option's value travels in the environment variable, because SGLang's processes are handed a record of SGLang's
    own options. ``default_max_rank``: what ``--max-lora-rank`` means if it is not given.
    """

    class StoreInEnvironment(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None) -> None:
            try:
                parse_bytes(str(values))
            except ValueError as error:
                parser.error(f"{option_string}: {error}")
            os.environ[memory_variable] = str(values)

    def add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if action.dest == "lora_backend" and action.choices is not None:
                action.choices = [*action.choices, BACKEND]
        parser.add_argument(memory_flag, action=StoreInEnvironment, default=argparse.SUPPRESS, help=memory_help)

    def check_lora_server_args(original: Callable, server_args) -> None:
        given = resolving_view(server_args)
        if given.lora_backend == BACKEND and (given.enable_lora or given.lora_paths):
            refuse_unsupported(given)
            # SGLang wants both declared, or adapters at start to infer them from. Scute needs neither.
            declare_resolution(
                server_args,
                "scute",
                max_lora_rank=given.max_lora_rank or default_max_rank,
                lora_target_modules={"all"},
            )
        original(server_args)

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", add_cli_args, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.arg_groups.lora_hook.check_lora_server_args", check_lora_server_args, HookType.AROUND
    )


def refuse_unsupported(args) -> None:
    """Raises ``ValueError`` for server modes in which adapters are not served."""
    for used, mode, way_out in (
        (args.enable_lora_overlap_loading, "--enable-lora-overlap-loading", "adapters are copied in ahead of a step"),
        (args.pp_size > 1, "--pp-size > 1", "use --tp-size"),
        (args.enable_dp_attention, "--enable-dp-attention", "use --tp-size, or several servers"),
        # In these a layer sees only some of the rows of the batch.
        (args.attn_cp_size > 1, "--attn-cp-size > 1", "use --tp-size"),
        (args.dcp_size > 1, "--dcp-size > 1", "use --tp-size"),
        (args.enable_prefill_cp, "--enable-prefill-cp", "use --tp-size"),
        (args.moe_dense_tp_size is not None, "--moe-dense-tp-size", "leave it out"),
        (args.moe_a2a_backend != "none", "--moe-a2a-backend", "leave it out"),
        (args.enable_attn_tp_input_scattered, "--enable-attn-tp-input-scattered", "leave it out"),
        (args.enable_two_batch_overlap, "--enable-two-batch-overlap", "leave it out"),
        (args.enable_pdmux, "--enable-pdmux", "leave it out"),
        (args.speculative_algorithm is not None, "--speculative-algorithm", "leave it out"),
    ):
        if used:
            raise ValueError(f"--lora-backend scute does not serve adapters with {mode}: {way_out}")
