"""FourierFT: a change of the weight that is a sum of a few two-dimensional waves, whose amplitudes are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.digest import digest
from scute_converter.normal_form import Basis, NormalForm, SharedPair
from scute_converter.registry import Conversion, Variant, register

_SPECTRUM = "fourierft_spectrum"


@dataclass(frozen=True, kw_only=True)
class FourierFTConfig(MethodConfig):
    """PEFT's ``FourierFTConfig``. The numbers of frequencies are those of the tensors."""

    irrelevant = frozenset({"init_weights", "n_frequency", "n_frequency_pattern"})

    random_loc_seed: int = 777
    scaling: float = 150.0


VARIANTS = (Variant("FourierFT", "0.12", "d e", limits="needs the base model to be known"),)


@register("FOURIERFT", prefix="fourierft_", config=FourierFTConfig, variants=VARIANTS)
def convert(checkpoint: Checkpoint, config: FourierFTConfig, base: Base) -> Conversion:
    """``y = x W + b0 + scaling * x Re(ifft2(S))^T`` with ``S (out, in)`` zero but for ``n`` places, drawn from
    ``random_loc_seed`` (``peft.tuners.fourierft.layer.FourierFTLayer``).

    An amplitude ``c`` at ``(u, v)`` adds ``c / (in out) * cos(2 pi (u o / out + v i / in))``, which is a product of
    cosines minus a product of sines. So layers of one shape share a basis of cosines and sines of rank ``2 n``, and
    ``d = scaling / (in out) * [c, -c]``.
    """
    places: dict[tuple[int, int], torch.Tensor] = {}
    keys: dict[tuple[int, int, int], str] = {}
    forms, bases = {}, {}
    for module in checkpoint.modules(_SPECTRUM):
        spectrum = checkpoint.take(module, _SPECTRUM, dims=1).double()
        n = spectrum.shape[0]
        if module not in base.shapes:
            problem = "belongs to places in the weight that follow from its shape, which is not known"
            raise checkpoint.error(module, _SPECTRUM, problem, "serve a base model whose linear layers are known")
        shape = out_features, in_features = base.shapes[module]
        if n > out_features * in_features:
            problem = f"has {n} elements for a weight of shape {shape}"
            raise checkpoint.error(module, _SPECTRUM, problem, "use the base model that the adapter is for")
        if (*shape, n) not in keys:
            checkpoint.reserve(module, _SPECTRUM, 2 * n, in_features)
            checkpoint.reserve(module, _SPECTRUM, 2 * n, out_features)
            if shape not in places:
                generator = torch.Generator("cpu").manual_seed(config.random_loc_seed)
                places[shape] = torch.randperm(out_features * in_features, generator=generator)
            first = places[shape][:n]
            basis = Basis(a=_waves(first % in_features, in_features), b=_waves(first // in_features, out_features))
            keys[*shape, n] = digest(basis)
            bases[keys[*shape, n]] = basis
        amplitudes = spectrum * (config.scaling / (in_features * out_features))
        d = checkpoint.converted(module, _SPECTRUM, torch.cat([amplitudes, -amplitudes]))
        shared = SharedPair(keys[*shape, n], d, torch.ones(out_features))
        forms[module] = NormalForm(in_features, out_features, shared=shared)
    return Conversion("FourierFT", forms, bases)


def _waves(frequencies: torch.Tensor, size: int) -> torch.Tensor:
    """Cosines, then sines, of ``2 pi f i / size``: ``(2 n, size)`` fp32 for ``frequencies (n,)`` int64.

    The products are reduced modulo ``size`` as integers, so that no angle is large.
    """
    positions = torch.arange(size)
    phases = frequencies[:, None] * positions % size
    angles = positions.double() * (2 * math.pi / size)
    return torch.cat([angles.cos().float()[phases], angles.sin().float()[phases]])
