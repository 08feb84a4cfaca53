"""The normal form: one formula for every adapter method.

Row vectors; ``W`` is the base weight of one Hugging Face linear layer, shape ``(in, out)`` (PyTorch stores its
transpose). Every adapted projection of every adapter is

    F(x) = ((x R) W + b0) * s + bias + (x A) B + (((x A_shared) * d) B_shared) * e

where ``b0`` is the bias of the base layer (zero if it has none). A slot that is ``None`` is the identity. Slots that
lie close to the identity are kept as their difference from it, so that rounding them to the serving dtype rounds the
adapter's effect and not the identity: ``scale_delta = s - 1``, ``rotation_delta = R - I``.

Tensors are fp32 on the CPU, in full (unsharded) Hugging Face shapes, contiguous. ``A`` and ``B`` are stored as
``a (r, in)`` and ``b (r, out)``: the long dimension is contiguous in both, which is also how the kernels read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Pair:
    """A low-rank pair that the adapter owns; every factor beside it is folded in.

    ``a``: ``(r, in)``, the transpose of ``A``. ``b``: ``(r, out)``, ``B`` itself. For an embedding, ``in`` is the
    vocabulary and the product ``x A`` is the column ``a[:, token]``.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class SharedPair:
    """A reference to a shared basis with the vectors around it.

    ``basis``: key into ``Adapter.bases``. ``d``: ``(r,)``. ``e``: ``(out,)``. The pair of a layer is the prefix
    ``a[:, :in]`` and ``b[:, :out]`` of the basis.
    """

    basis: str
    d: torch.Tensor
    e: torch.Tensor


@dataclass(frozen=True)
class Basis:
    """A pair that many layers and many adapters share. ``a``: ``(r, in_max)``. ``b``: ``(r, out_max)``.

    Its key in ``Adapter.bases`` is a digest of the content, so equal bases of two adapters are one basis.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class Rotation:
    """The input transform ``R``, block-diagonal with blocks of ``k`` features.

    ``delta``: ``R - I`` as ``(blocks, k, k)``: block ``j`` maps features ``[j k, (j + 1) k)`` as ``x_j R_j``. With
    ``block_share`` it is ``(1, k, k)`` and serves every position. A diagonal (IA)3 input scale is ``k == 1``:
    ``(in, 1, 1)`` holding ``g - 1``.
    """

    delta: torch.Tensor

    @property
    def block(self) -> int:
        return self.delta.shape[-1]


class Deferred(Protocol):
    """Slots that need the base weight; resolved by the engine with the weight as it serves it.

    Under tensor parallel each rank works on its shard: ``measure`` returns a tensor that is summed over the shards of
    the input dimension (and is complete as it is when the input is not sharded), ``resolve`` finishes with the sum.
    """

    def shard(self, rows: tuple[int, int], cols: tuple[int, int]) -> Deferred:
        """The same for output features ``rows`` and input features ``cols`` (half-open ranges)."""
        ...

    def measure(self, weight: torch.Tensor, form: NormalForm) -> torch.Tensor:
        """``weight``: ``(out, in)`` as PyTorch stores it, this rank's shard, any float dtype and device."""
        ...

    def resolve(self, form: NormalForm, measured: torch.Tensor) -> NormalForm:
        """The finished normal form; ``deferred`` is ``None`` in it."""
        ...


class Fold(Protocol):
    """A pair, or other slots, that follow from the whole base weight, such as a decomposition of it.

    Unlike ``Deferred`` it cannot work on shards: the engine gathers the weight of the projection and shards the result.
    ``rank``: the most that the pair can have which it gives.
    """

    @property
    def rank(self) -> int: ...

    def fold(self, form: NormalForm, weight: torch.Tensor) -> NormalForm:
        """The finished normal form; ``fold`` is ``None`` in it.

        ``weight``: ``(out, in)`` as PyTorch stores it, whole, any float dtype and device; the result is on the CPU.
        """
        ...


@dataclass(frozen=True)
class Bias:
    """What happens to the bias of the base layer.

    ``replace``: ``(out,)``, takes the place of ``b0`` (``bias="all"`` saves absolute values), or ``None``.
    ``add``: ``(out,)``, added unscaled after everything else (``lora_bias``), or ``None``.
    ``scaled``: whether ``s`` multiplies the base bias ((IA)3: yes; DoRA: no).
    ``scale_delta``: ``(out,)``, a scale of the base bias alone (GLoRA), as its difference from 1, or ``None``.
    """

    replace: torch.Tensor | None = None
    add: torch.Tensor | None = None
    scaled: bool = False
    scale_delta: torch.Tensor | None = None


@dataclass(frozen=True)
class NormalForm:
    """One adapted projection. ``in_features``/``out_features``: of the Hugging Face layer (or of the shard), 0 where no
    tensor of the adapter has that length ((IA)3 knows one of the two, VeRA only ``out``).

    For an embedding ``in`` is the vocabulary, and the weight that ``deferred`` measures is ``(dim, vocab)``.

    ``base_sample``: where slots were made from a base weight before loading (``scute_converter.native``), the start of
    its first row, ``W[0, :8]`` as PyTorch stores it, by which another base model is refused. It is no part of what is
    computed.
    """

    in_features: int
    out_features: int
    pair: Pair | None = None
    shared: SharedPair | None = None
    scale_delta: torch.Tensor | None = None
    rotation: Rotation | None = None
    bias: Bias = field(default_factory=Bias)
    deferred: Deferred | None = None
    fold: Fold | None = None
    base_sample: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter: normal forms by Hugging Face module path (``model.layers.0.self_attn.q_proj``).

    ``method``: the name shown to people (``"DoRA"``). ``digest``: hex digest of what is served (forms and bases), the
    identity of the adapter whatever its name or path. ``parameters``: how many numbers were trained. ``notes``:
    one-line warnings for the user. ``payloads``: full weights by module path (``lm_head``, ``model.embed_tokens``), as
    stored and possibly still memory-mapped. PEFT saves them beside an adapted embedding or after a change of the
    vocabulary. They are no part of the forms: whoever serves the adapter compares them with the base weights and
    refuses it if they differ. ``added_tokens``: ids by token, as the folder has them; whoever serves the adapter
    refuses it if the base model has no such token.
    """

    method: str
    forms: dict[str, NormalForm]
    bases: dict[str, Basis]
    digest: str
    parameters: int
    notes: tuple[str, ...] = ()
    payloads: dict[str, torch.Tensor] = field(default_factory=dict)
    added_tokens: dict[str, int] = field(default_factory=dict)
