"""Which tensor of an adapter file is what, and whether all of them fit the model.

Only names, shapes and dtypes are looked at: no tensor has been read yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minilora.config.engine import MAX_LORA_RANK
from minilora.config.errors import AdapterError, known_names, shown
from minilora.lora.adapter_files import TensorInfo
from minilora.lora.peft_config import AdapterConfig

Infos = Mapping[str, TensorInfo]
Shapes = Mapping[str, tuple[int, int]]  # module -> (in, out) features

EMBEDDING = "model.embed_tokens"
_PREFIX = "base_model.model."  # PEFT's own wrappers
_MOST_LISTED = 12
_FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
# Old files keep the name that the adapter had in PEFT: lora_A.default.weight
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<infix>[^.]+))?\.weight")
_LORA_EMBEDDING = re.compile(
    r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(?:\.(?P<infix>[^.]+))?"
)
_BASE_COPY = re.compile(r"(?P<module>model\.embed_tokens|lm_head)\.base_layer\.weight")
# Tensors of features that minilora lacks: the first that is found in a key names it.
_FEATURES = (
    (re.compile(r"\.lora_magnitude_vector"), "use_dora"),
    (re.compile(r"\.lora_[AB](\.[^.]+)?\.bias$"), "lora_bias"),
    (re.compile(r"trainable_tokens"), "trainable_token_indices"),
    (re.compile(r"\.modules_to_save\."), "modules_to_save"),
    (re.compile(r"^(?!.*(lora_|base_layer)).*\.weight$"), "modules_to_save"),
    (re.compile(r"^(?!.*lora_).*\.bias$"), "bias"),
)


@dataclass
class Halves:
    """The keys of one module's A and B."""

    a: str = ""
    b: str = ""


@dataclass
class SortedKeys:
    """The keys of an adapter file by what they are.

    Attributes:
        halves: of modules that the model has: name -> keys of A and B.
        base_copies: key -> module, of copies of a base weight: PEFT writes one for an
            embedding or head with LoRA (``save_embedding_layers="auto"``).
        features: name of a feature that minilora lacks -> its keys.
        misfits: key -> why it does not fit the model.
        infixes: names of adapters within keys.
    """

    halves: dict[str, Halves] = field(default_factory=dict)
    base_copies: dict[str, str] = field(default_factory=dict)
    features: dict[str, list[str]] = field(default_factory=dict)
    misfits: dict[str, str] = field(default_factory=dict)
    infixes: set[str] = field(default_factory=set)


def sort_keys(keys: Iterable[str], shapes: Shapes) -> SortedKeys:
    """Sort the keys of an adapter file; keys may have PEFT's prefix or not."""
    found = SortedKeys()
    for key in keys:
        name = key.removeprefix(_PREFIX)
        lora = _LORA.fullmatch(name) or _LORA_EMBEDDING.fullmatch(name)
        if lora:
            _add_half(found, key, lora, shapes)
        elif copy := _BASE_COPY.fullmatch(name):
            found.base_copies[key] = copy["module"]
        elif feature := next((name for regex, name in _FEATURES if regex.search(key)), None):
            found.features.setdefault(feature, []).append(key)
        else:
            found.misfits[key] = "no tensor of LoRA"
    return found


def _add_half(found: SortedKeys, key: str, lora: re.Match[str], shapes: Shapes) -> None:
    module, half = lora["module"], lora["half"].lower()
    if lora["infix"]:
        found.infixes.add(lora["infix"])
    if module not in shapes:
        found.misfits[key] = "the model has no such module"
    elif (lora.re is _LORA_EMBEDDING) != (module == EMBEDDING):
        kind = "lora_embedding_" if module == EMBEDDING else "lora_"
        found.misfits[key] = f"{module} takes {kind}A and {kind}B"
    elif getattr(found.halves.setdefault(module, Halves()), half):
        found.misfits[key] = f"a second lora_{lora['half']} of {module}"
    else:
        setattr(found.halves[module], half, key)


def refuse_unsupported(found: SortedKeys, peft: AdapterConfig) -> None:
    """Refuse what minilora lacks, by config or by tensor, all in one message."""
    tensors = [f"{name} (tensors {known_names(k, 4)})" for name, k in found.features.items()]
    if peft.unsupported or tensors:
        of_config = f" adapter_config.json has {_listed(peft.unsupported)};" * bool(
            peft.unsupported
        )
        of_file = f" this file has {_listed(tensors)};" * bool(tensors)
        raise AdapterError(
            f"it uses features that minilora does not support:{of_config}{of_file} "
            "train the adapter without them, or merge it into the base model with PEFT"
        )


def check_fit(
    found: SortedKeys, infos: Infos, shapes: Shapes, peft: AdapterConfig, max_lora_rank: int
) -> None:
    """Refuse tensors that do not all fit the model and the config, naming each and why.

    Raises:
        AdapterError: also for a rank over `max_lora_rank`, of the config or of a tensor.
    """
    if not infos:
        raise AdapterError("it holds no tensors, so the adapter has no weights")
    if len(found.infixes) > 1:
        raise AdapterError(
            f"it holds the tensors of several adapters, {known_names(found.infixes)}; save one"
        )
    for module, halves in found.halves.items():
        _check_rank(module, halves, infos, shapes[module], peft, max_lora_rank)
        found.misfits |= _misfits_of(module, halves, infos, shapes, peft)
    if found.misfits:
        bad, total = len(found.misfits), len(infos)
        how_many = f"none of its {total} tensors fits" if bad == total else (
            f"{bad} of its {total} tensors {'does' if bad == 1 else 'do'} not fit"
        )  # fmt: skip
        reasons = [f"{shown(key, 200)} ({why})" for key, why in sorted(found.misfits.items())]
        raise AdapterError(f"{how_many} the model: {_listed(reasons)}")
    if not found.halves:
        raise AdapterError("it holds no tensor of LoRA, so the adapter has no weights")


def _check_rank(
    module: str,
    halves: Halves,
    infos: Infos,
    sizes: tuple[int, int],
    peft: AdapterConfig,
    max_lora_rank: int,
) -> None:
    rank = peft.rank_of(module)
    if halves.a and infos[halves.a].shape[1:] == sizes[:1]:
        rank = max(rank, infos[halves.a].shape[0])
    if halves.b and infos[halves.b].shape[:1] == sizes[1:]:
        rank = max(rank, *infos[halves.b].shape[1:2])
    if rank > max_lora_rank:
        way_out = (
            f"start with max_lora_rank={rank} or more"
            if rank <= MAX_LORA_RANK
            else f"minilora serves ranks up to {MAX_LORA_RANK}"
        )
        raise AdapterError(
            f"the rank {rank} of {module} is over max_lora_rank={max_lora_rank}; {way_out}"
        )


def _misfits_of(
    module: str, halves: Halves, infos: Infos, shapes: Shapes, peft: AdapterConfig
) -> dict[str, str]:
    inputs, outputs = shapes[module]
    r = peft.rank_of(module)
    wanted = {halves.a: (r, inputs), halves.b: (outputs, r)}
    misfits = {}
    for key, shape in wanted.items():
        why = key and _why_not(infos[key], shape, r)
        if not why and not peft.targets(module):
            why = "adapter_config.json does not target it, so PEFT would ignore it"
        if not why and "" in wanted:
            why = f"its lora_{'B' if key == halves.a else 'A'} is missing"
        if key and why:
            misfits[key] = why
    return misfits


def _why_not(info: TensorInfo, wanted: tuple[int, int], r: int) -> str:
    if 0 in info.shape:
        return f"the shape {info.shape} holds no weights"
    if info.dtype not in _FLOATS:
        return f"the dtype {info.dtype}; minilora reads float64, float32, float16, bfloat16"
    if info.shape != wanted:
        return (
            f"the shape {info.shape}; the model and r={r} of adapter_config.json ask for {wanted}"
        )
    return ""


def _listed(items: Sequence[str]) -> str:
    rest = f"; and {len(items) - _MOST_LISTED} more" if len(items) > _MOST_LISTED else ""
    return ", ".join(items[:_MOST_LISTED]) + rest
