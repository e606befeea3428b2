"""Read and validate the folder of a LoRA adapter that PEFT saved.

The update of a module is ``W + scaling * B @ A`` (LoRA, arXiv:2106.09685). Nothing is folded
here: the slots fold the scaling into B, the oracle uses the parts as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from minilora.config.errors import AdapterError, MiniloraError, known_names
from minilora.config.json_file import read_json_object
from minilora.config.model import ModelConfig
from minilora.lora.adapter_files import WeightsFile, find_files, find_folder, open_weights
from minilora.lora.adapter_keys import check_fit, refuse_unsupported, sort_keys
from minilora.lora.peft_config import AdapterConfig

logger = logging.getLogger("minilora")

_MOST_TEXT = 5000  # of an error: names in a hostile file can be megabytes long


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """One module's update: ``W + scaling * b @ a``.

    Attributes:
        a: ``[r, in]``; of the embedding (PEFT's lora_embedding_A) ``[r, vocab]``.
        b: ``[out, r]``; of the embedding ``[hidden, r]``.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA (arXiv:2312.03732).
    """

    a: torch.Tensor
    b: torch.Tensor
    r: int
    lora_alpha: float
    scaling: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter in host memory.

    Attributes:
        modules: by full name, as in `ModelConfig.lora_modules`; only those that it changes.
        digest: of everything above that was read; files that compute something else differ.
    """

    name: str
    path: str
    modules: Mapping[str, LoraWeights]
    digest: str

    @property
    def max_rank(self) -> int:
        """The largest rank of its modules."""
        return max(weights.r for weights in self.modules.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all A and B."""
        return sum(w.a.nbytes + w.b.nbytes for w in self.modules.values())


def load_adapter(
    name: str,
    path: str | os.PathLike[str],
    config: ModelConfig,
    *,
    max_lora_rank: int,
    dtype: torch.dtype | None = None,
    base_weight: Callable[[str], torch.Tensor] | None = None,
    adapter_root: str | None = None,
) -> Adapter:
    """Read a PEFT folder: adapter_config.json, and adapter_model.safetensors or .bin.

    The tensors in the file decide what is loaded. All of them must fit the model, and be what
    the config targets. Everything but their values is checked before any of them is read.

    Args:
        name: of the adapter, for messages.
        path: the folder.
        config: the model.
        max_lora_rank: the largest rank that is accepted, of any module.
        dtype: A and B are cast to it once; None keeps the file's.
        base_weight: returns the weight ``[vocab, hidden]`` of "model.embed_tokens" or "lm_head".
            PEFT writes a copy of it beside LoRA on that module. The copy is ignored if it equals
            the weight in the coarser of both dtypes. One that differs, or that cannot be compared
            because this argument is None, is refused.
        adapter_root: if set, the folder and its files must lie below it, links resolved.

    Raises:
        AdapterError: the folder is incomplete, damaged, not supported or does not fit; the
            message names the adapter, the file, and what is wrong in it.
    """
    with _naming(f"adapter {name!r}"):
        folder = find_folder(path, adapter_root)
        config_file, weights_file = find_files(folder, adapter_root)
        content = read_json_object(config_file)
        with _naming(str(config_file)):
            peft = AdapterConfig.from_dict(content)
        with _naming(str(weights_file)), open_weights(weights_file) as weights:
            shapes = config.lora_modules()
            found = sort_keys(weights.infos, shapes)
            refuse_unsupported(found, peft)
            check_fit(found, weights.infos, shapes, peft, max_lora_rank)
            for key, module in found.base_copies.items():
                _check_copy(weights, key, module, base_weight)
            reader = _Reader(weights, peft, dtype)
            modules = {m: reader.read(m, h.a, h.b) for m, h in sorted(found.halves.items())}
        _warn_of_missing(name, peft, set(shapes) - set(modules))
    return Adapter(name, os.fspath(path), modules, reader.digest)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Raise every error as an `AdapterError` that says first what it is about."""
    try:
        yield
    except (MiniloraError, OSError) as error:
        text = str(error)
        text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
        raise AdapterError(f"{what}: {text}") from None


def _warn_of_missing(name: str, peft: AdapterConfig, others: set[str]) -> None:
    missing = [m for m in others if peft.target_modules is not None and peft.targets(m)]
    if missing:
        logger.warning(
            "adapter %r: its config targets modules that its file has no tensors for; "
            "they stay as they are: %s",
            name,
            known_names(missing),
        )


def _check_copy(
    weights: WeightsFile,
    key: str,
    module: str,
    base_weight: Callable[[str], torch.Tensor] | None,
) -> None:
    """Accept a copy of a base weight only if it is one; it is compared piece by piece."""
    if base_weight is None:
        raise AdapterError(
            f"{key!r} is a copy of a base weight, which cannot be compared without base_weight"
        )
    base, shape = base_weight(module), weights.infos[key].shape
    if shape != tuple(base.shape):
        raise AdapterError(
            f"{key!r} has the shape {shape}, but the weight of {module} has {tuple(base.shape)}: "
            "a vocabulary that was changed in training is not supported"
        )
    for rows, piece in weights.pieces(key):
        if not _equal(base[rows], piece.to(base.device)):
            raise AdapterError(
                f"{key!r} differs from the model's own weight of {module}: the adapter belongs "
                "to another base model, or trained that weight in full, which is not supported"
            )


def _equal(base: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether both are equal in the coarser of both dtypes.

    The adapter may have been trained on the checkpoint in another dtype than it is served in.
    """
    return torch.equal(base, copy.to(base.dtype)) or torch.equal(base.to(copy.dtype), copy)


class _Reader:
    """Reads the A and B of modules, checks their values, and digests all of it."""

    def __init__(
        self, weights: WeightsFile, peft: AdapterConfig, dtype: torch.dtype | None
    ) -> None:
        self._weights, self._peft, self._dtype = weights, peft, dtype
        self._sha = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._sha.hexdigest()

    def read(self, module: str, key_a: str, key_b: str) -> LoraWeights:
        r, alpha = self._peft.rank_of(module), self._peft.alpha_of(module)
        scaling = self._peft.scaling_of(module)
        self._sha.update(repr((module, r, alpha, scaling)).encode())
        a, b = self._tensor(key_a), self._tensor(key_b)
        if self._dtype and float(b.abs().max()) * abs(scaling) > torch.finfo(self._dtype).max:
            raise AdapterError(
                f"{key_b!r} times its scaling {scaling:g} is not finite as {b.dtype}"
            )
        return LoraWeights(a, b, r, alpha, scaling)

    def _tensor(self, key: str) -> torch.Tensor:
        """Return an own copy: what the file gives may be a view of its mapping."""
        source = self._weights.read(key)
        flat = source.contiguous().view(-1).view(torch.uint8)
        self._sha.update(f"{source.dtype} {tuple(source.shape)}".encode())
        self._sha.update(flat.numpy().data)
        own = torch.empty(source.shape, dtype=self._dtype or source.dtype).copy_(source)
        if not own.isfinite().all():
            raise AdapterError(f"{key!r} holds NaN or infinity (as {own.dtype})")
        return own
