"""OFT: the input is rotated block by block. Several generations of PEFT store and build the rotation differently."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.errors import AdapterError
from scute_converter.normal_form import NormalForm, Rotation
from scute_converter.registry import Conversion, Variant, register

# Of a Cayley-Neumann series; users take 3 to 8.
_MOST_TERMS = 64
# Of R R^T - I. The rotation is off by as much, which is some roundings of fp32, in which it is kept.
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class OFTConfig(MethodConfig):
    """PEFT's ``OFTConfig``. The sizes of blocks are those of the tensors: PEFT adjusts the config's to the layer.

    ``use_cayley_neumann`` has no default here: a file that lacks it does not say how the rotation is built.
    """

    irrelevant = frozenset({"init_weights", "module_dropout", "oft_block_size", "r"})

    coft: bool = False
    eps: float = 6e-5
    block_share: bool = False
    use_cayley_neumann: bool | None = None
    num_cayley_neumann_terms: int = 5


VARIANTS = (Variant("OFT", "0.14", "R", limits="files of PEFT before 0.14 rotate outputs and are refused"),)


@register("OFT", prefix="oft_", config=OFTConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: OFTConfig, base: Base) -> Conversion:
    """``y = (x R) W + b0`` with a block-diagonal ``R`` (``peft.tuners.oft.layer.OFTRotationModule``).

    PEFT 0.16 and later store ``oft_R.weight``. 0.14 and 0.15 stored ``oft_r`` and an output scale ``oft_s``:
    ``y = ((x R) W) * s + b0``. Before that ``oft_r`` rotated the output, and is refused.
    """
    if modules := checkpoint.modules("oft_r"):
        return Conversion("OFT", checkpoint.each(modules, lambda module: _of_0_14(checkpoint, config, module)))
    old_series, notes = _generation(checkpoint.adapter, config)
    modules = checkpoint.modules("oft_R.weight")
    return Conversion(
        "OFT", checkpoint.each(modules, lambda module: _of_0_16(checkpoint, config, module, old_series)), notes=notes
    )


def _generation(adapter: str, config: OFTConfig) -> tuple[bool, tuple[str, ...]]:
    """Whether the Cayley-Neumann series is that of PEFT before 0.18.0, which PEFT later replaced."""
    if config.use_cayley_neumann is None:
        problem = "is missing, and it decides how the rotation is built"
        raise AdapterError(adapter, "field use_cayley_neumann of adapter_config.json", problem, "add it")
    if not config.use_cayley_neumann:
        return False, ()
    if not 1 <= config.num_cayley_neumann_terms <= _MOST_TERMS:
        problem = f"{config.num_cayley_neumann_terms} is not within 1 and {_MOST_TERMS}"
        raise AdapterError(adapter, "field num_cayley_neumann_terms of adapter_config.json", problem, "correct it")
    if config.peft_version is None:  # PEFT writes it since 0.18
        return True, ("no peft_version: served with the Cayley-Neumann series of PEFT before 0.18, as it was trained",)
    where = "field peft_version of adapter_config.json"
    numbers = re.match(r"(\d+)\.(\d+)", config.peft_version)
    if numbers is None:
        raise AdapterError(adapter, where, f"{config.peft_version!r} is no version", "correct it")
    if config.peft_version.startswith("0.18.0.dev"):
        problem = f"{config.peft_version} is a development build with one of two Cayley-Neumann series"
        raise AdapterError(adapter, where, problem, "set it to 0.17.0 (the older series) or 0.18.0")
    return tuple(map(int, numbers.groups())) < (0, 18), ()


def _of_0_16(checkpoint: Checkpoint, config: OFTConfig, module: str, old_series: bool) -> NormalForm:
    """``oft_R.weight (blocks, k (k - 1) / 2)``: the upper triangles of skew-symmetric matrices, row by row."""
    vectors = checkpoint.take(module, "oft_R.weight", dims=2).double()
    blocks, elements = vectors.shape
    k = (1 + math.isqrt(1 + 8 * elements)) // 2
    if k * (k - 1) // 2 != elements:
        problem = f"{elements} elements are no upper triangle of a square block"
        raise checkpoint.error(module, "oft_R.weight", problem, "save the adapter again with PEFT")
    _check_sharing(checkpoint, config, module, "oft_R.weight", blocks)
    rows, columns = torch.triu_indices(k, k, 1)
    q = torch.zeros(blocks, k * k, dtype=torch.float64).index_copy_(1, rows * k + columns, vectors).view(blocks, k, k)
    q = q - q.transpose(1, 2)
    if config.coft:
        q = _constrained(q, config.eps / math.sqrt(blocks))
    if config.use_cayley_neumann:
        delta = _neumann(q, config.num_cayley_neumann_terms, old_series)
        rotation = Rotation(checkpoint.converted(module, "oft_R.weight", delta))
    else:
        rotation = cayley(checkpoint, module, "oft_R.weight", q)
    return NormalForm(0 if config.block_share else blocks * k, 0, rotation=rotation)


def _of_0_14(checkpoint: Checkpoint, config: OFTConfig, module: str) -> NormalForm:
    """``oft_r (blocks, k, k)``, of which the skew-symmetric part counts, and ``oft_s (out, 1)``."""
    if not checkpoint.has(module, "oft_s"):
        problem = "without oft_s: the adapter was trained with PEFT before 0.14, which rotated the output"
        raise checkpoint.error(module, "oft_r", problem, "train it again with PEFT 0.18 or later")
    parameter = checkpoint.take(module, "oft_r", dims=3).double()
    blocks, k, columns = parameter.shape
    if k != columns:
        problem = f"has blocks of {(k, columns)}, which are not square"
        raise checkpoint.error(module, "oft_r", problem, "save the adapter again")
    _check_sharing(checkpoint, config, module, "oft_r", blocks)
    if config.coft:
        problem = "coft=true in an adapter of PEFT 0.14 or 0.15 is not served"
        raise checkpoint.error(module, "oft_r", problem, "train it again with PEFT 0.18 or later")
    scale = checkpoint.take(module, "oft_s", dims=2).flatten()
    return NormalForm(
        in_features=0 if config.block_share else blocks * k,
        out_features=scale.shape[0],
        scale_delta=scale - 1,
        rotation=cayley(checkpoint, module, "oft_r", (parameter - parameter.transpose(1, 2)) / 2),
    )


def _check_sharing(checkpoint: Checkpoint, config: OFTConfig, module: str, suffix: str, blocks: int) -> None:
    if config.block_share and blocks != 1:
        problem = f"has {blocks} blocks, with block_share=true"
        raise checkpoint.error(module, suffix, problem, "correct block_share in adapter_config.json")


def _constrained(q: torch.Tensor, eps: float) -> torch.Tensor:
    """COFT: every block scaled down to Frobenius norm ``eps`` if it is longer (PEFT: ``_project_batch``)."""
    norm = torch.linalg.matrix_norm(q, keepdim=True)
    return torch.where(norm <= eps, q, q * (eps / norm))


def cayley(checkpoint: Checkpoint, module: str, suffix: str, q: torch.Tensor) -> Rotation:
    """``R = (I - Q) (I + Q)^-1`` of skew-symmetric ``q (blocks, k, k)`` in fp64, kept as ``R - I = -2 Q (I + Q)^-1``.

    The smallest singular value of ``I + Q`` is at least 1 and the largest grows with ``Q``: from about 1e9 on, fp64 may
    not say what the rotation is. It is not orthogonal then.
    """
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    delta, _ = torch.linalg.solve_ex(eye + q, -2 * q, left=False)
    rotation = delta + eye
    if not (rotation @ rotation.mT - eye).abs().max() <= _TOLERANCE:  # nor if it is NaN
        problem = f"has elements of up to {q.abs().max():.3g}, of which no rotation can be computed in fp64"
        raise checkpoint.error(module, suffix, problem, "save from a sound checkpoint")
    return Rotation(delta.float())


def _neumann(q: torch.Tensor, terms: int, old_series: bool) -> torch.Tensor:
    """``R - I`` for the truncated series of ``(I + Q) (I - Q)^-1`` (the other direction than the exact form).

    ``2 Q + 2 Q^2 + ... + 2 Q^(terms - 1)`` before PEFT 0.18. Since 0.18 the last power has the weight 1, and 3 terms
    are the same as 4 (PEFT: ``_cayley_batch``).
    """
    if terms < 2:
        return torch.zeros_like(q)
    last = terms - 1 if old_series or terms == 2 else max(terms - 1, 3)
    delta, power = 2 * q, q
    for exponent in range(2, last + 1):
        power = power @ q
        delta.add_(power, alpha=1 if exponent == last and not old_series else 2)
    return delta
