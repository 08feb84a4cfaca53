"""A base model as files: its modules and shapes without a server, and single weights out of its checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from scute_sglang.fit import KNOWN_LINEAR_LAYERS, LANGUAGE_MODEL, SLICE_NAMES

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# Last names of the modules that the server adapts, where SGLang calls them as Hugging Face does (``sites.wrap_model``).
# Routers, say, are not among them.
ADAPTABLE = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "q_b_proj", "in_proj"),
        *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"),
    }
)

# SGLang computes their embedding, and a head that is tied to it, by a layer of torch's, which no wrapper knows.
_PLAIN_EMBEDDING = frozenset({"gemma3_text"})


class BaseModelError(ValueError):
    """A base model that cannot be read; the message is one line."""

    def __init__(self, model: str, problem: str, remedy: str) -> None:
        super().__init__(" ".join(f"base model {model}: {problem}; {remedy}".split()))


@dataclass(frozen=True)
class BaseProjection:
    """One projection of the base model (``fit.Projection``). ``slices``: names of the projections that it consists of
    where only SGLang fuses them."""

    name: str
    in_features: int
    out_features: int
    has_bias: bool
    embedding: bool = False
    slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class BaseFolder:
    """A Hugging Face model in a folder, or on the Hub.

    ``name``: as it was given. ``folder``: the local one, ``None`` for a model of the Hub. ``family``: ``model_type`` of
    the config. ``dtype``: of the weights; fp32 if they are quantised (see ``scute_converter.base.Base``), ``None`` if
    the config does not say. ``shapes``: ``(out, in)`` of every linear layer in the order of ``named_modules()``.
    ``projections``: what the server can adapt, by name.
    """

    name: str
    folder: Path | None
    family: str
    dtype: torch.dtype | None
    quantised: bool
    tied: bool
    shapes: dict[str, tuple[int, int]]
    projections: dict[str, BaseProjection]

    @classmethod
    def open(cls, model: str) -> BaseFolder:
        """``model``: a local folder, or the ``config.json`` in it; only if there is none of that name, an id on the
        Hugging Face Hub, of which files are downloaded as they are needed. Builds the model from its config without
        weights. Raises BaseModelError."""
        import transformers

        path = Path(model)
        if path.name == _CONFIG and path.is_file():
            path = path.parent
        folder = path if path.exists() else None
        if folder is None and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
            raise BaseModelError(model, "there is no such folder", "give the folder of a Hugging Face model")
        config_file = _file(model, folder, _CONFIG)
        try:
            config = transformers.AutoConfig.from_pretrained(
                str(config_file.parent), local_files_only=True, trust_remote_code=False
            )
            network = _network(config)
        except Exception as error:  # whatever a config makes transformers raise
            problem = f"transformers builds no model from its {_CONFIG} ({error})"
            raise BaseModelError(model, problem, "give a model that needs no code of its own") from error
        quantised = getattr(config, "quantization_config", None) is not None
        dtype = torch.float32 if quantised else config.dtype if isinstance(config.dtype, torch.dtype) else None
        tied = bool(getattr(config, "tie_word_embeddings", False))
        linear = {name: m for name, m in network.named_modules() if isinstance(m, nn.Linear)}
        return cls(
            name=model,
            folder=folder,
            family=str(config.model_type),
            dtype=dtype,
            quantised=quantised,
            tied=tied,
            shapes={name: (layer.out_features, layer.in_features) for name, layer in linear.items()},
            projections=_projections(network, without_ends=config.model_type in _PLAIN_EMBEDDING, tied=tied),
        )

    @property
    def known(self) -> bool:
        """Whether the server's modules are known to be those of ``projections``."""
        return self.family in KNOWN_LINEAR_LAYERS

    @property
    def has_weights(self) -> bool:
        """Whether weights can be read without a download."""
        return self.folder is not None and any((self.folder / file).exists() for file in (_INDEX, _SINGLE))

    def weight(self, path: str) -> torch.Tensor:
        """The weight of a projection as the checkpoint stores it, memory-mapped: ``(out, in)``, for an embedding
        ``(vocabulary, dim)``. Raises BaseModelError."""
        projection = self.projections[path]
        if projection.slices:
            return torch.cat([self.weight(name) for name in projection.slices])
        if self.tied and path.endswith("lm_head") and f"{path}.weight" not in self._files:
            path = next(name for name, other in self.projections.items() if other.embedding)
        tensor = self._read(f"{path}.weight")
        shape = (projection.out_features, projection.in_features)
        expected = shape[::-1] if projection.embedding else shape
        if tuple(tensor.shape) != expected:
            problem = f"tensor {path}.weight has shape {tuple(tensor.shape)}, by the config it should have {expected}"
            raise BaseModelError(self.name, problem, "copy config and weights from one checkpoint")
        return tensor

    def bias(self, path: str) -> torch.Tensor | None:
        """The bias ``(out,)`` of a projection as the checkpoint stores it, ``None`` if it has none."""
        projection = self.projections[path]
        if not projection.has_bias:
            return None
        parts = [self._read(f"{name}.bias") for name in projection.slices or (path,)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @cached_property
    def _files(self) -> dict[str, str]:
        """The name of the file that holds each tensor of the checkpoint."""
        try:
            index = _file(self.name, self.folder, _INDEX)
        except BaseModelError:
            with self._opened(_SINGLE) as opened:
                return dict.fromkeys(opened.keys(), _SINGLE)
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise BaseModelError(self.name, f"{_INDEX} is broken ({error})", "download or copy it again") from error

    def _read(self, tensor: str) -> torch.Tensor:
        if self.quantised:
            problem = "its weights are quantised, and slots are made from plain ones"
            raise BaseModelError(self.name, problem, "give the model that it was quantised from")
        if tensor not in self._files:
            problem = f"its checkpoint holds no tensor {tensor}"
            raise BaseModelError(self.name, problem, "give the checkpoint as transformers saves this model")
        with self._opened(self._files[tensor]) as opened:
            return opened.get_tensor(tensor)

    def _opened(self, name: str) -> Any:
        file = _file(self.name, self.folder, name)
        try:
            return safetensors.safe_open(file, framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            problem = f"{name} is broken or cut off ({error})"
            raise BaseModelError(self.name, problem, "download or copy it again") from error


def _file(model: str, folder: Path | None, name: str) -> Path:
    """A file of the model; one of the Hub is downloaded unless it is in the cache."""
    if folder is not None:
        if not (folder / name).exists():
            raise BaseModelError(model, f"has no {name}", "give the folder of a Hugging Face model in safetensors")
        return folder / name
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(model, name))
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        problem = f"there is no such folder, and {name} did not come from the Hugging Face Hub ({error})"
        raise BaseModelError(model, problem, "give the folder of a Hugging Face model") from error


def _network(config: Any) -> nn.Module:
    """The model of a config, without memory for its weights."""
    import transformers

    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is not None:
            return architecture(config)
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _projections(network: nn.Module, *, without_ends: bool, tied: bool) -> dict[str, BaseProjection]:
    found: dict[str, BaseProjection] = {}
    for path, module in network.named_modules():
        leaf = path.rpartition(".")[2]
        if not LANGUAGE_MODEL.match(path) or ".experts." in path or leaf not in ADAPTABLE:
            continue
        if isinstance(module, nn.Embedding) and not without_ends:
            found[path] = BaseProjection(path, module.num_embeddings, module.embedding_dim, False, embedding=True)
        elif isinstance(module, nn.Linear) and not (leaf == "lm_head" and without_ends and tied):
            found[path] = BaseProjection(path, module.in_features, module.out_features, module.bias is not None)
    # SGLang's own modules, which adapters may name as a whole too.
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in found):
        for fused, names in SLICE_NAMES.items():
            slices = tuple(f"{parent}.{name}" for name in names)
            if all(name in found for name in slices):
                parts = [found[name] for name in slices]
                found[f"{parent}.{fused}"] = BaseProjection(
                    name=f"{parent}.{fused}",
                    in_features=parts[0].in_features,
                    out_features=sum(part.out_features for part in parts),
                    has_bias=parts[0].has_bias,
                    slices=slices,
                )
    return found
