"""Sites: where the projections of the Hugging Face model lie in SGLang's (fused, sharded) layers.

PEFT names ``model.layers.0.self_attn.q_proj``; SGLang computes it as the first slice of
``model.layers.0.self_attn.qkv_proj``, and under tensor parallel only some of its rows. A *site* is one such slice on
this rank. Models that Hugging Face itself fuses (Phi-3's ``qkv_proj``) name the whole module; its slices then are row
ranges of one projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.lora.utils import auto_detect_lora_target_modules, get_normalized_target_modules
from torch import nn

from scute_sglang.fit import KNOWN_LINEAR_LAYERS, LANGUAGE_MODEL, SLICE_NAMES
from scute_sglang.layers import (
    ScuteLayer,
    ScuteMergedColumnParallelLinear,
    ScuteParallelLMHead,
    ScuteQKVParallelLinear,
    ScuteRowParallelLinear,
    ScuteVocabParallelEmbedding,
    wrap,
)

# Multi-head latent attention multiplies by this weight inside its own kernels, past any wrapper.
NOT_SERVED = frozenset({"kv_b_proj"})

Range = tuple[int, int]


@dataclass(frozen=True)
class Site:
    """One slice of one wrapped layer on this rank.

    ``index``: its row in the adapter table. ``rows``/``cols``: the output/input features of the Hugging Face projection
    that this rank computes, half-open. ``local_rows``: where its outputs lie in the output of the layer.
    ``input_sharded``: whether the input is split over the ranks (row-parallel), so that partial sums are reduced.
    """

    index: int
    layer: ScuteLayer
    rows: Range
    cols: Range
    local_rows: Range
    input_sharded: bool = False

    @property
    def bias(self) -> torch.Tensor | None:
        """This rank's slice of the base bias, or ``None``."""
        bias = getattr(self.layer.base_layer, "bias", None)
        return None if bias is None else bias[self.local_rows[0] : self.local_rows[1]]

    @property
    def bias_in_output(self) -> bool:
        """Whether the layer's own output already holds the bias (SGLang may hand it out separately)."""
        return not getattr(self.layer.base_layer, "skip_bias_add", False)

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds output shifts: outputs that are summed over ranks get them from one rank only."""
        return not self.input_sharded or get_group_rank_size(self.layer.base_layer.tp_group)[0] == 0


@dataclass(frozen=True)
class Projection:
    """A Hugging Face projection: its full sizes, and its sites (several if Hugging Face fuses it too).

    ``fused``: whether it is a module of SGLang's that other projections are slices of.
    """

    name: str
    in_features: int
    out_features: int
    sites: tuple[Site, ...]
    embedding: bool = False
    fused: bool = False

    @property
    def has_bias(self) -> bool:
        return self.sites[0].bias is not None


@dataclass(frozen=True)
class SiteMap:
    """Every projection that adapters may name, and the wrapped layers in the order of their ``module_index``."""

    projections: dict[str, Projection]
    layers: tuple[ScuteLayer, ...]
    sites: tuple[Site, ...]
    family: str

    @cached_property
    def module_of_site(self) -> tuple[int, ...]:
        """The ``module_index`` of the layer of each site."""
        return tuple(site.layer.module_index for site in self.sites)

    @cached_property
    def names(self) -> list[str]:
        """Of each site, for messages: the last projection that it is part of, or its number if it is padding."""
        names = [f"site {site.index}" for site in self.sites]
        for path, projection in self.projections.items():
            for site in projection.sites:
                names[site.index] = path
        return names

    @cached_property
    def head(self) -> int:
        """The ``module_index`` of the output head, ``-1`` if none is wrapped."""
        heads = (layer.module_index for layer in self.layers if isinstance(layer, ScuteParallelLMHead))
        return next(heads, -1)

    @cached_property
    def products_of_a_row(self) -> float:
        """Multiplications that a row takes in a wrapped linear layer, the mean, of all ranks together. Experts are not
        wrapped, and do not count."""
        ends = (ScuteVocabParallelEmbedding, ScuteParallelLMHead)
        parts = [p for p in self.projections.values() if not p.fused and not isinstance(p.sites[0].layer, ends)]
        layers = sum(not isinstance(layer, ends) for layer in self.layers)
        return sum(p.in_features * p.out_features for p in parts) / max(1, layers)

    def base_shapes(self) -> dict[str, tuple[int, int]]:
        """``(out, in)`` of every linear projection by Hugging Face name, in the order of ``named_modules()``; empty if
        it is not certain that these are all the linear layers of the Hugging Face model."""
        if self.family not in KNOWN_LINEAR_LAYERS:
            return {}
        named = {name: p for name, p in self.projections.items() if not p.embedding and not p.fused}
        return {name: (p.out_features, p.in_features) for name, p in named.items()}


def wrap_model(model: nn.Module, lora_backend) -> SiteMap:
    """Replace every layer of ``model`` that can serve adapters by its wrapper and map the projections.

    Layers outside the language model (``should_apply_lora``), experts and layers of unknown classes stay as they are:
    an adapter that names them is refused at load.
    """
    untie_lm_head(model)
    targets = auto_detect_lora_target_modules(model) - NOT_SERVED
    layers: list[ScuteLayer] = []
    sites: list[Site] = []
    projections: dict[str, Projection] = {}
    applies = getattr(model, "should_apply_lora", None)

    def add(name: str, layer: ScuteLayer) -> None:
        layer.module_index = len(layers)
        layer.first_site = len(sites)
        layers.append(layer)
        found, of_layer = _projections(name, layer, len(sites), getattr(model, "config", None))
        projections.update((projection.name, projection) for projection in found)
        sites.extend(of_layer)

    for name, module in list(model.named_modules()):
        leaf = name.rsplit(".", 1)[-1]
        if not LANGUAGE_MODEL.match(name) or (applies is not None and ".layers." in f".{name}" and not applies(name)):
            continue
        if not targets & {leaf, ".".join(name.split(".")[-2:]), *get_normalized_target_modules([leaf])}:
            continue  # a router, say, whose attributes models read
        wrapped = wrap(module, lora_backend)
        if wrapped is None:
            continue
        model.set_submodule(name, wrapped)
        add(name, wrapped)
        if isinstance(wrapped, ScuteVocabParallelEmbedding) and not hasattr(model, "lm_head"):
            # Models that hand the embedding to the logits processor (Gemma) have no module that could be the head.
            head = ScuteParallelLMHead(head_over(wrapped.base_layer), lora_backend)
            wrapped.tie(head)
            add("lm_head", head)
    family = str(getattr(getattr(model, "config", None), "model_type", ""))
    return SiteMap(projections, tuple(layers), tuple(sites), family)


def untie_lm_head(model: nn.Module) -> None:
    """Give a tied ``lm_head`` a module of its own over the same weight, so that it can be wrapped by itself.

    SGLang uses the embedding module itself as the head of a tied model; an adapter on one must not act on the other.
    """
    head = getattr(model, "lm_head", None)
    if isinstance(head, VocabParallelEmbedding) and not isinstance(head, ParallelLMHead):
        model.lm_head = head_over(head)


def head_over(embedding: VocabParallelEmbedding) -> ParallelLMHead:
    """An output head with the weight of ``embedding``, without memory of its own."""
    weight: Any = embedding.weight
    with torch.device("meta"):
        head = ParallelLMHead(
            embedding.org_vocab_size,
            embedding.embedding_dim,
            params_dtype=weight.dtype,
            org_num_embeddings=embedding.org_vocab_size,
        )
    head.weight = weight
    head.quant_method = embedding.quant_method
    return head


def _projections(name: str, layer: ScuteLayer, first_site: int, config: Any) -> tuple[list[Projection], list[Site]]:
    """The projections that a wrapped layer computes, and its sites in the order of their numbers."""
    base = layer.base_layer
    parent, _, leaf = name.rpartition(".")
    if isinstance(layer, ScuteVocabParallelEmbedding):
        rows, cols = (0, base.embedding_dim), (0, base.org_vocab_size)
        site = Site(first_site, layer, rows, cols, rows)
        return [Projection(name, cols[1], rows[1], (site,), embedding=True)], [site]
    if isinstance(layer, ScuteParallelLMHead):
        shard = base.shard_indices
        rows = (shard.org_vocab_start_index, shard.org_vocab_end_index)
        site = Site(first_site, layer, rows, (0, base.embedding_dim), (0, rows[1] - rows[0]))
        return [Projection(name, base.embedding_dim, base.org_vocab_size, (site,))], [site]
    if isinstance(layer, ScuteRowParallelLinear):
        rank, size = get_group_rank_size(base.tp_group)
        width = base.input_size_per_partition
        in_features = _unpadded(base.input_size, "o_proj" if leaf == "o_proj" else "mlp", config)
        cols = _clip((rank * width, (rank + 1) * width), in_features)
        layer.in_features = cols[1] - cols[0]
        site = Site(first_site, layer, (0, base.output_size), cols, (0, base.output_size), input_sharded=size > 1)
        return [Projection(name, in_features, base.output_size, (site,))], [site]

    # The slices of a column-parallel layer, each with the padding that SGLang may have put behind it.
    names = SLICE_NAMES.get(leaf, (leaf,))
    padded, shards = _column_shards(layer)
    if len(names) != len(padded):
        names = (leaf,) * len(padded)  # fused in a way that only Hugging Face's own fused module can name
    kinds = [part if part in _PADDED_UNITS else "mlp" for part in names]
    full = [_unpadded(width, kind, config) for width, kind in zip(padded, kinds, strict=True)]
    widths: list[int] = []
    real: list[tuple[int, Range]] = []  # slice number and rows of each slice that is not padding
    for width, shard in zip(full, shards, strict=True):
        rows = _clip(shard, width)
        real.append((len(widths), rows))
        widths.append(rows[1] - rows[0])
        if (padding := shard[1] - shard[0] - widths[-1]) > 0:
            widths.append(padding)
    layer.set_slices(widths)
    sites = [
        Site(
            first_site + i,
            layer,
            (0, width),
            (0, base.input_size),
            (layer.slice_offsets[i], layer.slice_offsets[i + 1]),
        )
        for i, width in enumerate(widths)
    ]
    for i, rows in real:
        sites[i] = replace(sites[i], rows=rows)

    found = []
    if len(set(names)) == len(names):
        found += [
            Projection(f"{parent}.{part}", base.input_size, width, (sites[i],))
            for part, width, (i, _) in zip(names, full, real, strict=True)
        ]
    if leaf in SLICE_NAMES and len(real) > 1:  # the module as a whole, as models name it that Hugging Face fuses too
        start, whole = 0, []
        for width, (i, rows) in zip(full, real, strict=True):
            whole.append(replace(sites[i], rows=(start + rows[0], start + rows[1])))
            start += width
        found.append(Projection(name, base.input_size, start, tuple(whole), fused=True))
    return found, sites


# On a CPU SGLang pads heads and MLPs that do not divide among the ranks (``adjust_config_with_unaligned_cpu_tp``), and
# keeps the sizes of the checkpoint under another name: projection to (padded, original) field of the config.
_PADDED_UNITS = {
    "q_proj": ("num_attention_heads", "original_num_attention_heads"),
    "o_proj": ("num_attention_heads", "original_num_attention_heads"),
    "k_proj": ("num_key_value_heads", "original_total_num_kv_heads"),
    "v_proj": ("num_key_value_heads", "original_total_num_kv_heads"),
    "mlp": ("intermediate_size", "original_intermediate_size"),
}


def _unpadded(width: int, kind: str, config: Any) -> int:
    """The width in the checkpoint of a projection that SGLang computes ``width`` wide. ``kind``: key of the table."""
    padded_field, original_field = _PADDED_UNITS[kind]
    padded, original = getattr(config, padded_field, None), getattr(config, original_field, None)
    if not padded or not original or width % padded or (kind == "mlp" and width != padded):
        return width
    return width // padded * original


def _clip(features: Range, end: int) -> Range:
    return min(features[0], end), min(features[1], end)


def _column_shards(layer: ScuteLayer) -> tuple[list[int], list[Range]]:
    """Full output width of each slice as SGLang computes it, and the rows of it that are this rank's."""
    base = layer.base_layer
    if isinstance(layer, ScuteQKVParallelLinear):
        rank, _ = get_group_rank_size(base.tp_group)
        kv_rank = get_group_rank_size(base.kv_tp_group)[0] // base.num_kv_head_replicas
        full = [
            base.total_num_heads * base.head_size,
            base.total_num_kv_heads * base.head_size,
            base.total_num_kv_heads * base.v_head_size,
        ]
        widths = [base.q_proj_shard_size, base.kv_proj_shard_size, base.v_proj_shard_size]
        ranks = [rank, kv_rank, kv_rank]
    elif isinstance(layer, ScuteMergedColumnParallelLinear):
        rank, _ = get_group_rank_size(base.tp_group)
        full, widths = list(base.output_sizes), list(base.output_partition_sizes)
        ranks = [rank] * len(full)
    else:
        tp_group = getattr(base, "tp_group", None)
        rank = get_group_rank_size(tp_group)[0] if tp_group is not None else 0
        full, widths, ranks = [base.output_size], [layer.slice_offsets[-1]], [rank]
    return full, [(r * width, (r + 1) * width) for r, width in zip(ranks, widths, strict=True)]
