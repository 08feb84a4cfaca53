"""Wrapper layers: SGLang's own LoRA wrappers, told to call Scute's operators.

Each class derives from the SGLang wrapper of the same linear layer and inherits its ``forward`` (bias, gather and
all-reduce rules), which hands the work to ``ScuteLoRABackend.forward_with_base``. The constructors replace those of
SGLang, which allocate pinned offset tensors that Scute does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    ParallelLMHeadWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from sglang.srt.lora.utils import capturing_lora_graph
from torch import nn

from scute_sglang.backend import ScuteLoRABackend


class ScuteLayer(BaseLayerWithLoRA):
    """What every wrapper adds to the wrapped layer.

    ``module_index``: number of this layer among the wrapped ones. ``first_site``: number of its first site.
    ``slice_offsets``: first output column of each slice as this rank computes it, and the end. ``in_features``: how
    many of this rank's inputs are the model's, if SGLang has padded them; ``None`` if all are.
    """

    lora_backend: ScuteLoRABackend
    # A SGLang layer: its classes share attributes (weight, bias, quant_method), but no interface that says so.
    base_layer: Any

    def __init__(self, base_layer: nn.Module, lora_backend: ScuteLoRABackend, slice_widths: list[int]) -> None:
        BaseLayerWithLoRA.__init__(self, base_layer, lora_backend)
        self.set_lora = True
        self.module_index = -1
        self.first_site = -1
        self.in_features: int | None = None
        self.set_slices(slice_widths)
        # Arguments of SGLang's segmented-GEMM interface that Scute finds in its table instead.
        self.lora_a = self.lora_b = self.output_offset = self._output_offset = self.lora_offsets = None

    def set_slices(self, widths: list[int]) -> None:
        self.slice_offsets = (0, *accumulate(widths))

    @property
    def lora_active(self) -> bool:
        """Whether this forward runs adapter operators here: the batch holds an adapter of this very layer, or a graph
        that must serve every later batch is being captured."""
        if capturing_lora_graph():
            return self.lora_backend.batch_info is not None
        return self.lora_backend.touches(self.module_index)

    @property
    def shows_weight(self) -> bool:
        """Whether the weight is that which the base layer's GEMM computes with, in a layout that can be read."""
        layer = self.base_layer
        plain = isinstance(layer.quant_method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        return plain and not getattr(layer, "use_intel_amx_backend", False)  # AMX repacks even unquantised weights

    @property
    def added_bias(self) -> torch.Tensor | None:
        """What the wrapper's own forward adds on this rank before any reduction."""
        return None if self.base_layer.skip_bias_add else self.base_layer.bias

    def base_linear(self, x: torch.Tensor) -> torch.Tensor:
        """The base layer on other inputs than those of the forward: ``(rows, in)`` to ``(rows, out)``, this rank's
        shard, with ``added_bias``, before any reduction."""
        return self.base_layer.quant_method.apply(self.base_layer, x, self.added_bias)

    def base_columns(self, x: torch.Tensor, columns: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        """Some columns of ``base_linear``, of a layer that shows its weight. ``out``: where they are written, if
        given."""
        weight, bias = self.base_layer.weight[columns], self.added_bias
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        output = nn.functional.linear(x, weight, bias[columns])  # rounds once, as the base layer does
        return output if out is None else out.copy_(output)

    @property
    def inputs(self) -> int:
        """How many features this rank's layer reads."""
        return self.base_layer.input_size

    def rehearse(self, rows: int) -> None:
        """``ScuteLoRABackend.adapted`` of so many base rows, for the kernels that it launches."""
        outputs = self.slice_offsets[-1]
        self.lora_backend.adapted(self, self._some(rows, self.inputs), lambda x: self._some(len(x), outputs), None)

    def _some(self, rows: int, features: int) -> torch.Tensor:
        """``(rows, features)`` that overlap, since nobody reads them; by how much is what Triton asks of a stride."""
        stride = 16 + features % 16
        memory = torch.empty(
            rows * stride + features, dtype=self.lora_backend.pool.dtype, device=self.lora_backend.device
        )
        return memory.as_strided((rows, features), (stride, 1))

    def start_lora_a_overlap(self, x: torch.Tensor) -> None:
        """SGLang's hook for its side stream; Scute starts its own in ``ScuteLoRABackend.adapted``."""


class ScuteColumnParallelLinear(ScuteLayer, ColumnParallelLinearWithLoRA):
    def __init__(self, base_layer: ColumnParallelLinear, lora_backend: ScuteLoRABackend) -> None:
        super().__init__(base_layer, lora_backend, [base_layer.output_size_per_partition])


class ScuteMergedColumnParallelLinear(ScuteLayer, ColumnParallelLinearWithLoRA):
    def __init__(self, base_layer: MergedColumnParallelLinear, lora_backend: ScuteLoRABackend) -> None:
        super().__init__(base_layer, lora_backend, list(base_layer.output_partition_sizes))


class ScuteQKVParallelLinear(ScuteLayer, ColumnParallelLinearWithLoRA):
    def __init__(self, base_layer: QKVParallelLinear, lora_backend: ScuteLoRABackend) -> None:
        widths = [base_layer.q_proj_shard_size, base_layer.kv_proj_shard_size, base_layer.v_proj_shard_size]
        super().__init__(base_layer, lora_backend, widths)


class ScuteRowParallelLinear(ScuteLayer, RowParallelLinearWithLoRA):
    def __init__(self, base_layer: RowParallelLinear, lora_backend: ScuteLoRABackend) -> None:
        super().__init__(base_layer, lora_backend, [base_layer.output_size])

    @property
    def inputs(self) -> int:
        return self.base_layer.input_size_per_partition

    @property
    def added_bias(self) -> torch.Tensor | None:
        first_rank = get_group_rank_size(self.base_layer.tp_group)[0] == 0
        return super().added_bias if first_rank else None


class ScuteReplicatedLinear(ScuteLayer, ReplicatedLinearWithLoRA):
    def __init__(self, base_layer: ReplicatedLinear, lora_backend: ScuteLoRABackend) -> None:
        super().__init__(base_layer, lora_backend, [base_layer.output_size])


class ScuteVocabParallelEmbedding(ScuteLayer, VocabParallelEmbeddingWithLoRA):
    """The embedding; SGLang reduces its output before the adapter is added, so every rank holds whole adapter parts."""

    new_embeddings_buffer = embedding_A_buffer = embedding_B_buffer = None
    tied_head: ScuteParallelLMHead | None = None

    def __init__(self, base_layer: VocabParallelEmbedding, lora_backend: ScuteLoRABackend) -> None:
        super().__init__(base_layer, lora_backend, [base_layer.embedding_dim])
        self.vocab_size = base_layer.org_vocab_size

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return super().forward(input_) if self.lora_active else self.base_layer.forward(input_)

    @property
    def inputs(self) -> int:
        """How many tokens it knows."""
        return self.vocab_size

    def rehearse(self, rows: int) -> None:
        tokens = torch.zeros(rows, dtype=torch.int64, device=self.lora_backend.device)
        output = self._some(rows, self.slice_offsets[-1])
        self.lora_backend.adapted(self, tokens, lambda _: output, None, embedding=True)

    def tie(self, head: ScuteParallelLMHead) -> None:
        """Let ``head``, over the same weight, stand for this embedding where SGLang uses it as the output head."""
        self.__dict__["tied_head"] = head  # no submodule: the model's own list of parameters stays as it is

    def logits(self, hidden: torch.Tensor, base: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """As of the output head that is tied to it."""
        return base(hidden) if self.tied_head is None else self.tied_head.logits(hidden, base)

    # SGLang calls these on what it uses as the head, before and after a pass over some of the rows.
    set_lm_head_pass = ParallelLMHeadWithLoRA.set_lm_head_pass
    reset_lm_head_pass = ParallelLMHeadWithLoRA.reset_lm_head_pass


class ScuteParallelLMHead(ScuteLayer, ParallelLMHeadWithLoRA):
    """The output head: a column-parallel linear layer over the vocabulary, whose shards may end in padding."""

    lm_head_A_buffer = lm_head_B_buffer = None

    def __init__(self, base_layer: ParallelLMHead, lora_backend: ScuteLoRABackend) -> None:
        super().__init__(base_layer, lora_backend, [base_layer.shard_indices.num_org_elements])
        self.vocab_size = base_layer.org_vocab_size

    @property
    def lora_active(self) -> bool:
        """As of any layer, but for the head of an extend batch, which runs outside the graphs even when they replay."""
        batch = self.lora_backend.batch_info
        if batch is not None and batch.is_prefill:
            return self.lora_backend.touches(self.module_index)
        return super().lora_active

    @property
    def inputs(self) -> int:
        return self.base_layer.embedding_dim

    @property
    def added_bias(self) -> torch.Tensor | None:
        return getattr(self.base_layer, "bias", None)

    def base_linear(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.base_layer.weight, self.added_bias)

    def logits(self, hidden: torch.Tensor, base: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Logits of ``hidden (rows, in)``; ``base``: how SGLang computes them without adapters."""
        if not self.lora_active:
            return base(hidden)
        return self.lora_backend.adapted(self, hidden, base, self._get_lm_head_batch_info(hidden.shape[0]))


# Subclasses before their bases: the first match wraps a layer.
WRAPPERS: dict[type[nn.Module], Callable[[Any, ScuteLoRABackend], ScuteLayer]] = {
    ParallelLMHead: ScuteParallelLMHead,
    VocabParallelEmbedding: ScuteVocabParallelEmbedding,
    ReplicatedLinear: ScuteReplicatedLinear,
    QKVParallelLinear: ScuteQKVParallelLinear,
    MergedColumnParallelLinear: ScuteMergedColumnParallelLinear,
    ColumnParallelLinear: ScuteColumnParallelLinear,
    RowParallelLinear: ScuteRowParallelLinear,
}


def wrap(layer: nn.Module, lora_backend: ScuteLoRABackend) -> ScuteLayer | None:
    """The wrapper of a SGLang layer, or ``None`` if Scute serves no adapters on layers of its class."""
    for base_class, wrapper in WRAPPERS.items():
        if isinstance(layer, base_class):
            return wrapper(layer, lora_backend)
    return None
