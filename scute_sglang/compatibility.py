"""Every symbol of SGLang that Scute hooks, overrides or calls on its way, with the signature it was written for."""

from __future__ import annotations

from importlib.metadata import version

from scute_patches.signatures import SGLANG_VERSION, IncompatibleSGLangError, require

_LAYERS = "sglang.srt.lora.layers"
_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
_BACKEND = "sglang.srt.lora.backend.base_backend.BaseLoRABackend"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_DECODE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

# The cheap ones: importing them loads no model layers, so that every process can check them.
SIGNATURES: dict[str, tuple[str, ...]] = {
    "sglang.srt.server_args.ServerArgs.add_cli_args": ("parser",),
    "sglang.srt.arg_groups.lora_hook.check_lora_server_args": ("server_args",),
    "sglang.srt.arg_groups.overrides.declare_resolution": ("server_args", "source", "fields"),
    "sglang.srt.arg_groups.overrides.resolving_view": ("server_args",),
    "sglang.srt.lora.backend.lora_registry.register_lora_backend": ("name",),
    "sglang.srt.lora.lora_registry.LoRARef": ("lora_id", "lora_name", "lora_path", "pinned"),
    "sglang.srt.lora.lora_registry.LoRARegistry.acquire": ("self", "lora_name"),
}

# Checked where the manager is built.
MODEL_SIGNATURES: dict[str, tuple[str, ...]] = {
    "sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager": ("self",),
    f"{_MANAGER}.init_state": ("self", "max_lora_rank", "target_modules", "lora_paths"),
    f"{_MANAGER}._load_lora_adapter": ("self", "lora_ref"),
    f"{_MANAGER}._load_lora_adapter_from_tensors": (
        "self",
        "lora_ref",
        "tensors",
        "config_dict",
        "added_tokens_config",
    ),
    f"{_MANAGER}._unload_lora_adapter": ("self", "lora_ref"),
    f"{_MANAGER}.validate_lora_batch": ("self", "lora_ids"),
    f"{_MANAGER}.fetch_new_loras": ("self", "new_loras", "running_loras"),
    f"{_MANAGER}.prepare_lora_batch": ("self", "forward_batch"),
    f"{_MANAGER}.can_use_prefill_cuda_graph": ("self", "forward_batch"),
    f"{_MANAGER}._use_cuda_graph_batch": ("self", "forward_batch"),
    f"{_BACKEND}.__init__": ("self", "max_loras_per_batch", "device"),
    f"{_BACKEND}.forward_with_base": (
        "self",
        "layer",
        "x",
        "base_fn",
        "lora_a",
        "lora_b",
        "output_offset",
        "offsets",
        "all_reduce",
        "kind",
        "pruned_batch_info",
    ),
    f"{_BACKEND}.init_decode_cuda_graph_batch_info": ("self", "max_bs_in_cuda_graph", "num_tokens_per_req"),
    f"{_BACKEND}.init_prefill_cuda_graph_batch_info": ("self", "max_num_tokens", "max_num_requests"),
    f"{_LAYERS}.BaseLayerWithLoRA": ("base_layer", "lora_backend"),
    f"{_LAYERS}.ColumnParallelLinearWithLoRA.forward": ("self", "input_"),
    f"{_LAYERS}.RowParallelLinearWithLoRA.forward": ("self", "input_", "skip_all_reduce", "forward_batch"),
    f"{_LAYERS}.ReplicatedLinearWithLoRA.forward": ("self", "x"),
    f"{_LAYERS}.VocabParallelEmbeddingWithLoRA.forward": ("self", "input_"),
    f"{_LAYERS}.ParallelLMHeadWithLoRA.forward": ("self", "hidden_states"),
    "sglang.srt.lora.utils.get_lm_head_pruned_lens": ("forward_batch",),
    "sglang.srt.lora.utils.get_batch_token_counts": ("forward_batch",),
    "sglang.srt.lora.utils.build_lm_head_pass_segments": ("weight_indices", "pruned_lens", "logprobs_chunk_size"),
    "sglang.srt.lora.utils.capturing_lora_graph": (),
    "sglang.srt.model_executor.runner_utils.capture_mode.model_capture_mode": (),
    "sglang.srt.model_executor.runner_utils.capture_mode.capture_lora_variant": ("variant",),
    "sglang.srt.runtime_context.max_prefill_buffer_tokens": (),
    "sglang.srt.lora.eviction_policy.get_eviction_policy": ("policy_name",),
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": (
        "self",
        "hidden_states",
        "lm_head",
        "embedding_bias",
        "out",
    ),
    f"{_DECODE}.capture_one_shape": (
        "self",
        "size",
        "forward",
        "stream_idx",
        "variant_label",
        "attention_variant",
    ),
    f"{_DECODE}._resolve_lora_variant": ("self", "forward_batch"),
    "sglang.srt.managers.schedule_batch.Req.__init__": (
        "self",
        "rid",
        "origin_input_text",
        "origin_input_ids",
        "sampling_params",
        "return_logprob",
        "top_logprobs_num",
        "dllm_config",
        "token_ids_logprob",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "return_flat_raw_top_logprobs",
        "stream",
        "origin_input_ids_unpadded",
        "lora_id",
        "input_embeds",
        "positional_embed_overrides",
        "token_type_ids",
        "session",
        "custom_logit_processor",
        "require_reasoning",
        "return_hidden_states",
        "return_routed_experts",
        "routed_experts_start_len",
        "return_indexer_topk",
        "eos_token_ids",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_mode",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "kv_hints",
        "vocab_size",
        "priority",
        "metrics_collector",
        "extra_key",
        "routing_key",
        "dimensions",
        "http_worker_ipc",
        "time_stats",
        "return_pooled_hidden_states",
        "multi_item_delimiter_indices",
        "token_indices_to_pool",
        "decision_layout",
        "session_id",
        "cache_salt",
    ),
    f"{_UPDATER}.update_weights_from_disk": (
        "self",
        "model_path",
        "load_format",
        "weight_name_filter",
        "recapture_cuda_graph",
    ),
    f"{_UPDATER}.load_weights_from_distributed": ("self", "named_tensors"),
    f"{_UPDATER}.update_weights_from_tensor": ("self", "named_tensors", "load_format"),
    f"{_UPDATER}.update_weights_from_ipc": ("self", "recv_req"),
}


def check(signatures: dict[str, tuple[str, ...]] = SIGNATURES) -> None:
    """Raises ``IncompatibleSGLangError`` with one readable line if SGLang is not what Scute was written for."""
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise IncompatibleSGLangError(
            f"Scute was written for SGLang {SGLANG_VERSION}, found {installed}: pip install sglang=={SGLANG_VERSION}"
        )
    for target, parameters in signatures.items():
        require(target, parameters)
