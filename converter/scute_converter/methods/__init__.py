"""One module per method; importing this package registers them all."""

from scute_converter.methods import ia3, lora, oft, vera

__all__ = ["ia3", "lora", "oft", "vera"]
