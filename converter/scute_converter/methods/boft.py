"""BOFT: the input is rotated by a product of sparse orthogonal factors, and the output scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.methods.oft import cayley
from scute_converter.normal_form import NormalForm
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class BOFTConfig(MethodConfig):
    """PEFT's ``BOFTConfig``. All sizes are those of the tensors: without its CUDA extension PEFT trains one factor
    whatever the config says."""

    irrelevant = frozenset(
        {"boft_block_num", "boft_block_size", "boft_dropout", "boft_n_butterfly_factor", "init_weights"}
    )


VARIANTS = (Variant("BOFT", "0.11", "R, s", limits="one butterfly factor"),)


@register("BOFT", prefix="boft_", config=BOFTConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: BOFTConfig, base: Base) -> Conversion:
    """``y = ((x R) W) * boft_s + b0`` with a block-diagonal ``R``, the Cayley transforms of the skew-symmetric parts of
    ``boft_R (1, blocks, k, k)`` (``peft.tuners.boft.layer.Linear``).
    """
    modules = checkpoint.modules("boft_R", "boft_s")
    return Conversion("BOFT", checkpoint.each(modules, lambda module: _convert_module(checkpoint, module)))


def _convert_module(checkpoint: Checkpoint, module: str) -> NormalForm:
    parameter = checkpoint.take(module, "boft_R", dims=4).double()
    factors, blocks, k, columns = parameter.shape
    if factors != 1:
        problem = f"has {factors} butterfly factors, of which one is served"
        raise checkpoint.error(module, "boft_R", problem, "train with boft_n_butterfly_factor=1")
    if k != columns:
        problem = f"has blocks of {(k, columns)}, which are not square"
        raise checkpoint.error(module, "boft_R", problem, "save the adapter again")
    scale = checkpoint.take(module, "boft_s", dims=2)
    if scale.shape[1] != 1:
        raise checkpoint.error(module, "boft_s", f"has shape {tuple(scale.shape)}, not (out, 1)", "save it again")
    if checkpoint.has(module, "boft_P"):  # files of PEFT 0.11 and 0.12
        order = checkpoint.take(module, "boft_P", dims=3, trained=False)
        if order.shape != (1, blocks * k, blocks * k) or not torch.equal(order, torch.eye(blocks * k)[None]):
            problem = "reorders the features, which one factor does not"
            raise checkpoint.error(module, "boft_P", problem, "save the adapter again with PEFT 0.13 or later")
    return NormalForm(
        in_features=blocks * k,
        out_features=scale.shape[0],
        scale_delta=scale.flatten() - 1,
        rotation=cayley(checkpoint, module, "boft_R", (parameter[0] - parameter[0].transpose(1, 2)) / 2),
    )
