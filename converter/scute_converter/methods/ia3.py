"""(IA)3: one vector per layer that scales its output, or its input in a feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

from scute_converter.base import Base
from scute_converter.checkpoint import Checkpoint
from scute_converter.config import MethodConfig
from scute_converter.normal_form import Bias, NormalForm, Rotation
from scute_converter.registry import Conversion, Variant, register


@dataclass(frozen=True, kw_only=True)
class IA3Config(MethodConfig):
    """PEFT's ``IA3Config``."""

    irrelevant = frozenset({"feedforward_modules", "init_ia3_weights"})


@register("IA3", prefix="ia3_", config=IA3Config, variants=(Variant("(IA)3", "0.3", "s, R"),))
def convert(checkpoint: Checkpoint, config: IA3Config, base: Base) -> Conversion:
    """``ia3_l (out, 1)``: ``y = (x W + b0) * l``. ``ia3_l (1, in)``: ``y = (x * l) W + b0``.

    The shape decides, as it does in PEFT once the layer is built (``peft.tuners.ia3.layer.Linear``).
    """
    forms = {}
    for module in checkpoint.modules("ia3_l"):
        vector = checkpoint.take(module, "ia3_l", dims=2)
        delta = vector.flatten() - 1
        rows, columns = vector.shape
        if columns == 1 and rows > 1:
            forms[module] = NormalForm(0, rows, scale_delta=delta, bias=Bias(scaled=True))
        elif rows == 1 and columns > 1:
            forms[module] = NormalForm(columns, 0, rotation=Rotation(delta.reshape(-1, 1, 1)))
        else:
            problem = f"has shape {(rows, columns)}, neither (out, 1) nor (1, in)"
            raise checkpoint.error(module, "ia3_l", problem, "save the adapter again with PEFT")
    return Conversion("(IA)3", forms)
