"""One module per method; importing this package registers them all."""

from scute_converter.methods import (
    adalora,
    deft,
    delora,
    gralora,
    hra,
    ia3,
    loha,
    lokr,
    lora,
    miss,
    oft,
    peanut,
    poly,
    pvera,
    vera,
)

__all__ = [
    "adalora",
    "deft",
    "delora",
    "gralora",
    "hra",
    "ia3",
    "loha",
    "lokr",
    "lora",
    "miss",
    "oft",
    "peanut",
    "poly",
    "pvera",
    "vera",
]
