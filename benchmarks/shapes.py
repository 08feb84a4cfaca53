"""Shapes of the models that the benchmarks, the byte model and the tests speak of; from their Hugging Face configs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Module:
    """A (fused) linear module: input features, and output features of each Hugging Face projection in it."""

    name: str
    in_features: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder. ``heads``, ``kv_heads``: of the attention; ``head_dim`` and all widths in features."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of one layer as SGLang fuses them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Module("qkv_proj", self.hidden, (q, kv, kv)),
            Module("o_proj", q, (self.hidden,)),
            Module("gate_up_proj", self.hidden, (self.intermediate, self.intermediate)),
            Module("down_proj", self.intermediate, (self.hidden,)),
        )


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
        ModelShape("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32768),
        ModelShape("tiny", 2, 96, 6, 2, 16, 192, 320),  # no published model: to try a benchmark out on a CPU
    )
}
