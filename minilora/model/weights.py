"""Load a checkpoint's weights tensor by tensor, straight into the model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open

from minilora.config.errors import CheckpointError, known_names, shown
from minilora.config.json_file import read_json_object
from minilora.model.llama import Llama

logger = logging.getLogger("minilora")

_PIECE_BYTES = 32 << 20  # read at most this much at once, so that loading needs little memory
_MAX_INDEX_BYTES = 64 << 20
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Older checkpoints carry the rotary frequencies, which minilora computes.
_COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@torch.no_grad()
def load_weights(model: Llama, folder: Path, *, progress: bool = False) -> None:
    """Fill every weight of `model` from the safetensors files of `folder`.

    A tensor is read in pieces and copied into place in the model's dtype and device, so that
    memory peaks little above the model itself.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, unknown, of another shape or
            dtype, or holds a value that is not finite; the file and the tensor are named.
    """
    targets = dict(model.checkpoint_tensors())
    files = check_weights(model, folder)
    if model.lm_head.tied and "lm_head.weight" in files:
        _warn_if_head_differs(files["lm_head.weight"], model, files)
    bar = track(
        targets.items(),
        description="Loading weights",
        total=len(targets),
        disable=not progress,
        console=Console(stderr=True),
        transient=True,
    )
    for name, target in bar:
        _fill(target, files[name], name)


@torch.no_grad()
def fill_weights(model: Llama, seed: int) -> None:
    """Fill every weight with random numbers that keep activations finite; norms with ones."""
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)


def check_weights(model: Llama, folder: Path) -> dict[str, Path]:
    """Return the file of every tensor, once their names and shapes are those of `model`.

    Only the headers of the files are read, and the weights of `model` are not touched: they may
    be on the meta device, so that a checkpoint is checked before any memory is taken for it.

    Raises:
        CheckpointError: as `load_weights`, but for values that are not finite.
    """
    targets = dict(model.checkpoint_tensors())
    files = _find_tensors(folder)
    _check_names(set(targets), files, model.config.tie_word_embeddings, folder)
    for file in sorted(set(files.values())):
        own = {name: t.shape for name, t in targets.items() if files[name] == file}
        _check_shapes(file, own)
    return files


def _check_shapes(file: Path, shapes: dict[str, torch.Size]) -> None:
    with safe_open(file, framework="pt") as content:
        for name, shape in shapes.items():
            tensor = content.get_slice(name)
            if tuple(tensor.get_shape()) != tuple(shape):
                raise CheckpointError(
                    f"{file}: {name} has the shape {tuple(tensor.get_shape())}; "
                    f"config.json asks for {tuple(shape)}"
                )
            if tensor.get_dtype() not in _FLOATS:
                raise CheckpointError(
                    f"{file}: {name} has the dtype {tensor.get_dtype()}; minilora reads "
                    f"{', '.join(sorted(_FLOATS))}"
                )


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor, from the index of a sharded checkpoint or the one file."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        files = [single]
    elif index.exists():
        shards = read_json_object(index, _MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
            raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
        names = sorted(set(shards.values()))
        strange = [name for name in names if not _is_file_name(name)]
        if strange:
            raise CheckpointError(f"{index} names {shown(strange[0])}, which is no file beside it")
        files = [folder / name for name in names]
    else:
        raise CheckpointError(f"{folder} has neither {single.name} nor {index.name}")
    found: dict[str, Path] = {}
    for file in files:
        for name in _names_in(file):
            if name in found:
                raise CheckpointError(f"{name} is in both {found[name]} and {file}")
            found[name] = file
    return found


def _is_file_name(name: str) -> bool:
    """Whether a name is one file of the folder, not a path out of it."""
    return name.isprintable() and Path(name).name == name and name not in ("", "..")


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as content:
            return list(content.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _check_names(wanted: set[str], files: dict[str, Path], tied: bool, folder: Path) -> None:
    missing = wanted - set(files)
    if missing:
        hint = "; set tie_word_embeddings if the head is the embedding" * (
            missing == {"lm_head.weight"}
        )
        raise CheckpointError(f"{folder} lacks the tensors {known_names(missing)}{hint}")
    ignored = {"lm_head.weight"} if tied else set()
    unknown = {name for name in set(files) - wanted - ignored if not _COMPUTED.fullmatch(name)}
    if unknown:
        raise CheckpointError(
            f"{files[min(unknown)]} holds tensors that the model of config.json does not have: "
            f"{known_names(unknown)}"
        )


def _pieces(file: Path, name: str, shape: torch.Size) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a tensor in runs of rows.

    The file is opened anew for each piece: the pages of a mapped file count as this process's
    memory until it is closed.
    """
    row_bytes = 4 * max(1, shape.numel() // shape[0])
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        with safe_open(file, framework="pt") as content:
            tensor = content.get_slice(name)
            rows = slice(start, min(start + step, shape[0]))
            yield rows, tensor[rows]


def _fill(target: torch.Tensor, file: Path, name: str) -> None:
    try:
        for rows, piece in _pieces(file, name, target.shape):
            target[rows].copy_(piece)
            if not target[rows].isfinite().all():
                dtype = str(target.dtype).removeprefix("torch.")
                raise CheckpointError(f"{file}: {name} is not finite as {dtype}")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: {name} cannot be read: {error}") from None


def _warn_if_head_differs(head: Path, model: Llama, files: dict[str, Path]) -> None:
    """Follow tie_word_embeddings, but say so where the file disagrees."""
    name, shape = "model.embed_tokens.weight", model.embed_tokens.weight.shape
    with safe_open(head, framework="pt") as content:
        tensor = content.get_slice("lm_head.weight")
        same = tuple(tensor.get_shape()) == tuple(shape) and tensor.get_dtype() in _FLOATS
    if same:
        ours, theirs = _pieces(files[name], name, shape), _pieces(head, "lm_head.weight", shape)
        same = all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    if not same:
        logger.warning(
            "%s: lm_head.weight differs from the embedding, but config.json says "
            "tie_word_embeddings; the embedding is used",
            head,
        )
