"""`make_tiny_adapter`: a random LoRA adapter on disk, laid out as PEFT lays out its own.

Both halves are random. PEFT starts with B = 0: such an adapter does nothing and hides every fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from minilora.config.checks import check_choice, strict_keywords
from minilora.config.errors import AdapterError
from minilora.config.model import LAYER_MODULES, ModelConfig
from minilora.testing.tiny import DTYPES, random_normal, write_json

EMBEDDINGS = ("embed_tokens", "lm_head")
_WHERE = "make_tiny_adapter: "


def make_tiny_adapter(folder: str | Path, model_folder: str | Path, **options: Any) -> Path:
    """Write a random adapter for a model as a PEFT folder; `options` are `TinyAdapter`'s fields.

    The same seed gives the same tensors to a module, whatever `lora_alpha`, `use_rslora` and
    the way of naming modules are: adapters that differ only there can be compared.

    Raises:
        AdapterError: no module of the model is targeted.
        ConfigError: an option that does not exist.
    """
    folder, adapter = Path(folder), TinyAdapter(**options)
    model_folder = Path(model_folder)
    modules = adapter.modules(ModelConfig.from_folder(model_folder))
    tensors = adapter.tensors(modules, model_folder)
    write_adapter(folder, adapter.config(model_folder), tensors, adapter.file_format)
    return folder


@strict_keywords
@dataclass(frozen=True)
class TinyAdapter:
    """What `make_tiny_adapter` can be asked for; names and meanings are those of `LoraConfig`.

    Attributes:
        target_modules: names, "all-linear", or a regex on full module names; "embed_tokens" and
            "lm_head" may be among them.
        rank_pattern: rank of modules whose name ends with the key (a regex), in place of `r`.
        alpha_pattern: the same for `lora_alpha`.
        save_embedding_layers: add a copy of the base weight of each embedding that is targeted.
            None does what PEFT does by default: only if it is targeted by its short name.
        dtype: of the tensors: "float32", "float16" or "bfloat16".
        file_format: "safetensors", or "bin" for the older adapter_model.bin.
        scale: size of what the adapter adds, relative to what the module itself puts out, at
            any rank with a `lora_alpha` of 16 and without rsLoRA (the tensors do not depend on
            those two). With the default every single module changes greedy answers.
        extra_config: keys laid over adapter_config.json at the end.
    """

    r: int = 8
    lora_alpha: float = 16
    target_modules: str | Sequence[str] = tuple(LAYER_MODULES)
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    layers_to_transform: int | Sequence[int] | None = None
    exclude_modules: str | Sequence[str] | None = None
    save_embedding_layers: bool | None = None
    dtype: str = "float32"
    file_format: str = "safetensors"
    scale: float = 0.2
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(_WHERE, "dtype", self.dtype, tuple(DTYPES))
        check_choice(_WHERE, "file_format", self.file_format, ("safetensors", "bin"))

    def config(self, model_folder: Path) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        return {
            **lora_config(model_folder),
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "target_modules": _plain(self.target_modules),
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "use_rslora": self.use_rslora,
            "layers_to_transform": _plain(self.layers_to_transform),
            "exclude_modules": _plain(self.exclude_modules),
            **self.extra_config,
        }

    def modules(self, model: ModelConfig) -> dict[str, tuple[int, int]]:
        """Return the modules that PEFT would adapt: full name -> (in, out) features."""
        found = {name: shape for name, shape in model.lora_modules().items() if self._targets(name)}
        if not found:
            raise AdapterError(
                f"{_WHERE}target_modules={self.target_modules!r} and the options beside it "
                "leave no module of the model"
            )
        return found

    def tensors(
        self, modules: Mapping[str, tuple[int, int]], model_folder: Path
    ) -> dict[str, torch.Tensor]:
        """Return A and B of every module under PEFT's names, and copies of base weights."""
        base_weight = _weight_reader(model_folder)
        tensors: dict[str, torch.Tensor] = {}
        for name, (inputs, outputs) in modules.items():
            r, weight = self.rank_of(name), base_weight(name)
            # A row of A sees one token of the embedding at a time, but all inputs of a layer.
            width = 1 if name.endswith("embed_tokens") else inputs
            a = random_normal((r, inputs), f"{name} A", self.seed) / math.sqrt(width)
            b = random_normal((outputs, r), f"{name} B", self.seed)
            b *= self.scale * math.sqrt(r) / 16 * weight.float().std() * math.sqrt(width)
            dtype = DTYPES[self.dtype]
            tensors |= lora_tensors(name, a.to(dtype), b.to(dtype))
            if self._copies_base(name):
                tensors[f"base_model.model.{name}.base_layer.weight"] = weight
        return tensors

    def rank_of(self, name: str) -> int:
        """Return a module's rank: the first key of `rank_pattern` that fits its name, or `r`."""
        fits = (r for key, r in self.rank_pattern.items() if re.match(rf"(.*\.)?({key})$", name))
        return next(fits, self.r)

    def _targets(self, name: str) -> bool:
        """PEFT's rules, which differ for a string and a list."""
        targets, excluded = self.target_modules, self.exclude_modules
        if excluded and (
            re.fullmatch(excluded, name) if isinstance(excluded, str) else _ends(name, excluded)
        ):
            return False
        if targets == "all-linear":
            return name.rpartition(".")[2] not in EMBEDDINGS
        if isinstance(targets, str):
            return re.fullmatch(targets, name) is not None
        if name in targets or self.layers_to_transform is None:
            return _ends(name, targets)  # a full name is taken whatever its layer is
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        layers = self.layers_to_transform
        layers = [layers] if isinstance(layers, int) else layers
        return _ends(name, targets) and layer is not None and int(layer[1]) in layers

    def _copies_base(self, name: str) -> bool:
        short = name.rpartition(".")[2]
        if short not in EMBEDDINGS or self.save_embedding_layers is not None:
            return short in EMBEDDINGS and bool(self.save_embedding_layers)
        # PEFT looks for the names in a list, but for full names where there is a regex.
        return isinstance(self.target_modules, str) or any(
            embedding in self.target_modules for embedding in EMBEDDINGS
        )


def _ends(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int)) else list(value)


def lora_config(model_folder: Path) -> dict[str, Any]:
    """Return the fields of `adapter_config.json` that are the same for every plain LoRA."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_folder),
        "inference_mode": True,
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
    }


def lora_tensors(name: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return A ``[r, in]`` and B ``[out, r]`` of a module under the names that PEFT gives them."""
    key = f"base_model.model.{name}"
    if name.endswith("embed_tokens"):
        return {f"{key}.lora_embedding_A": a, f"{key}.lora_embedding_B": b}
    return {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}


def write_adapter(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    file_format: str = "safetensors",
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` (or `.bin`)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", config)
    if file_format == "bin":
        torch.save(dict(tensors), folder / "adapter_model.bin")
    else:
        save_file(dict(tensors), folder / "adapter_model.safetensors", {"format": "pt"})


def _weight_reader(model_folder: Path) -> Callable[[str], torch.Tensor]:
    """Return a function that reads the weight of a module; a tied head has the embedding's."""
    files: dict[str, Path] = {}
    for file in sorted(model_folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            files |= dict.fromkeys(content.keys(), file)

    def read(name: str) -> torch.Tensor:
        key = f"{name}.weight"
        key = key if key in files else "model.embed_tokens.weight"
        with safe_open(files[key], framework="pt") as content:
            return content.get_tensor(key)  # type: ignore[no-any-return]

    return read
