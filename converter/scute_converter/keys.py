"""Names of stored tensors: from a key of a PEFT file to the path of the module and the parameter within it."""

from __future__ import annotations

from dataclasses import dataclass

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# Parts of a key at which the module path ends although they are not parameters of the method.
_PEFT_MODULES = frozenset({"base_layer", "token_adapter", "modules_to_save", "original_module"})


@dataclass(frozen=True)
class Key:
    """``module``: Hugging Face module path, ``""`` for a tensor of the whole model. ``suffix``: the parameter
    (``lora_A.weight``). ``wrappers``: names of training wrappers that were removed."""

    module: str
    suffix: str
    wrappers: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.module}.{self.suffix}" if self.module else self.suffix


def split_key(key: str, prefix: str) -> Key:
    """Split a stored key. ``prefix``: how the method's parameters begin (PEFT's ``BaseTuner.prefix``, ``"lora_"``).

    ``base_model.model.`` (``base_model.`` for a tensor of the whole model), the names that ``torch.compile``, FSDP,
    activation checkpointing and DDP put into a key, and the adapter name ``default`` are removed, the last as
    PEFT's ``_remove_adapter_name_from_key`` does.
    """
    stored = key.split(".")
    parts = [part for part in stored if part not in WRAPPERS] or stored
    wrappers = set(stored) & WRAPPERS

    def strip_ddp() -> None:
        # DDP's "module" is only a wrapper in front of a model; deeper down it may be a real name.
        if parts[0] == "module" and len(parts) > 1:
            del parts[0]
            wrappers.add("module")

    strip_ddp()
    if parts[0] == "base_model" and len(parts) > 1:
        del parts[0 : 2 if parts[1] == "model" and len(parts) > 2 else 1]
    strip_ddp()

    end = next((i for i, part in enumerate(parts) if part.startswith(prefix) or part in _PEFT_MODULES), len(parts) - 1)
    suffix = parts[end:]
    for position in (-1, -2):
        if len(suffix) > 1 and suffix[position] == "default":
            del suffix[position]
            break
    return Key(".".join(parts[:end]), ".".join(suffix), frozenset(wrappers))
