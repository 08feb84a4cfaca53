"""One module per method; importing this package registers them all."""

from scute_converter.methods import deft, hra, ia3, lora, oft, peanut, pvera, vera

__all__ = ["deft", "hra", "ia3", "lora", "oft", "peanut", "pvera", "vera"]
