"""How the LoRA kernels are launched: block sizes from a table, and what the launch checks.

A launch depends only on what a graph's key and the layer determine: the number of rows, the
number of groups, widths, rank and dtypes. Nothing is read from a device tensor.

The tables are data (`configs/*.json`, one an architecture) with the machine they were measured
on and how. An entry serves tiles of up to `rows` rows; of those with the same `rows` the one
with the largest width that the layer reaches is used. Entries with 1 row are for programs that
find their rows in the mapping.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton import knobs

from minilora.ops.scratch import empty

INTERPRETED: bool = knobs.runtime.interpret
MAX_SLICES = 3  # q, k and v
MAPPING_ROWS = 8  # up to here a program looks at every row; see `routing`
RANK_BLOCK = 16  # a decode kernel's block of ranks; an adapter pays for its own blocks only


class Routing(NamedTuple):
    """The tables of a `KernelMeta` that the kernels read, in the order of their arguments."""

    mapping: torch.Tensor
    order: torch.Tensor
    active_ids: torch.Tensor
    counts: torch.Tensor

    def groups(self, num_active_loras: int) -> int:
        """Return the groups of the grid; the tables describe no more than they hold."""
        return min(num_active_loras, self.active_ids.shape[0])


@dataclass(frozen=True)
class Tiles:
    """How rows are dealt to programs.

    Attributes:
        block_m: the most rows of one program.
        groups: 0 if a program finds its rows in the mapping; otherwise the number of groups,
            rounded up to a power of two.
        tiles: programs along the rows.
        block_r: ranks of one block. `shrink` fills whole blocks, so expand's divide shrink's.
    """

    block_m: int
    groups: int
    tiles: int
    block_r: int


@dataclass(frozen=True)
class ShrinkLaunch(Tiles):
    """A launch of the shrink kernel: `steps` steps of `block_k`, dealt to `ways` warps."""

    block_k: int
    steps: int
    ways: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ExpandLaunch(Tiles):
    """A launch of the expand kernel: `rest_r` ranks at a time after the first block."""

    rest_r: int
    block_n: int
    warps: int


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n (1 for n = 0)."""
    return 1 << max(0, n - 1).bit_length()


@lru_cache
def table(architecture: str) -> Mapping[str, Any]:
    """Return the measured table of an architecture ("cuda90"), or the default one."""
    folder = Path(__file__).parent / "configs"
    path = folder / f"{architecture}.json"
    loaded: Mapping[str, Any] = json.loads(
        (path if path.is_file() else folder / "default.json").read_text(encoding="utf-8")
    )
    return loaded


@lru_cache
def architecture(device: torch.device) -> str:
    """Return the name of a device's table: "cuda90" for an H200."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"hip{major}{minor}" if torch.version.hip else f"cuda{major}{minor}"


@lru_cache
def launches_early(device: torch.device) -> bool:
    """Return whether a kernel may be launched before the one in front of it has finished.

    That is programmatic dependent launch, which Hopper brought.
    """
    name = architecture(device)
    return not INTERPRETED and name.startswith("cuda") and int(name[4:]) >= 90


def _entry(device: torch.device, kernel: str, tiles: Tiles, width: int) -> Mapping[str, int]:
    rows = tiles.block_m if tiles.groups else 1
    entries = table(architecture(device))[kernel]
    fits = [e for e in entries if e["rows"] >= rows and e["width"] <= width]
    entry: Mapping[str, int] = min(fits, key=lambda e: (int(e["rows"]), -int(e["width"])))
    return entry


def _tiles(num_tokens: int, active: int, rank: int, most_rows: int) -> Tiles:
    """Deal the rows of a step, taking them to be spread evenly over the groups."""
    rank = max(RANK_BLOCK, next_power_of_2(rank))
    if num_tokens <= MAPPING_ROWS:
        return Tiles(MAPPING_ROWS, 0, active, RANK_BLOCK)
    rows = max(MAPPING_ROWS, next_power_of_2(-(-num_tokens // active)))
    block_m = min(rows, most_rows)
    tiles = -(-num_tokens // block_m) + min(active, num_tokens) - 1
    block_r = RANK_BLOCK if rows <= 32 else min(rank, 64)
    return Tiles(block_m, next_power_of_2(active), tiles, block_r)


def shrink_launch(
    num_tokens: int, active: int, width: int, rank: int, splits: int, x: torch.Tensor
) -> ShrinkLaunch:
    """Choose the launch of a shrink over `splits` parts of the width."""
    tiles = _tiles(num_tokens, active, rank, most_rows=64)
    entry = _entry(x.device, "shrink", tiles, width)
    block_k = entry["block_k"] * 2 // max(2, x.element_size())
    part = -(-width // splits)
    block_k = max(32, min(block_k, next_power_of_2(part)))
    warps = entry["warps"]
    ways = min(warps, block_k // 32) if tiles.block_m <= 32 else 1
    return ShrinkLaunch(
        **vars(tiles),
        block_k=block_k,
        steps=-(-part // block_k),
        ways=ways,
        warps=warps,
        stages=entry["stages"],
    )


def expand_launch(
    num_tokens: int, active: int, columns: int, rank: int, b: torch.Tensor
) -> ExpandLaunch:
    """Choose the launch of an expand into `columns` columns (of all slices together)."""
    tiles = _tiles(num_tokens, active, rank, most_rows=32)
    entry = _entry(b.device, "expand", tiles, columns)
    block_n = entry["block_n"]
    rest_r = max(RANK_BLOCK, min(2 * tiles.block_r, 64, next_power_of_2(rank - tiles.block_r)))
    if b.element_size() > 2:  # exact products take many more registers
        tiles, rest_r, block_n = replace(tiles, block_r=RANK_BLOCK), RANK_BLOCK, min(64, block_n)
    return ExpandLaunch(**vars(tiles), rest_r=rest_r, block_n=block_n, warps=entry["warps"])


def splits_of(
    num_tokens: int | torch.SymInt, slices: int, width: int, device: torch.device
) -> int | torch.SymInt:
    """Return into how many parts shrink divides the width.

    As many as fill the machine when rows are few, fewer as rows fill it themselves. There is no
    branch on the rows, so that a compiler to which they are a symbol makes one program of it.
    """
    data = table(architecture(device))
    most = max(1, min(data["most_splits"], -(-width // data["split_width"])))
    filled = (num_tokens * slices + data["fill_rows"] - 1) // data["fill_rows"]
    return torch.sym_max(1, most // torch.sym_max(1, filled))  # type: ignore[no-any-return]


def new_h(x: torch.Tensor, lora_a: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return unwritten ``h``, float32 ``[splits, slices, T, r]``."""
    splits = splits_of(x.shape[0], len(lora_a), x.shape[1], x.device)
    shape = (splits, len(lora_a), x.shape[0], lora_a[0].shape[1])
    return empty(shape, torch.float32, x.device)


def three(slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return three tensors for a kernel that takes three pointers; the last ones are unused."""
    return [*slices, *([slices[0]] * (MAX_SLICES - len(slices)))]


def check_slices(name: str, slices: Sequence[torch.Tensor], rank_dim: int) -> None:
    """Refuse what the kernels do not read right."""
    if not 1 <= len(slices) <= MAX_SLICES:
        raise ValueError(f"{name} has {len(slices)} slices; the kernels take 1 to {MAX_SLICES}")
    ranks = {weight.shape[rank_dim] for weight in slices}
    if len(ranks) > 1:
        raise ValueError(f"the slices of {name} have ranks {sorted(ranks)}; they must be one rank")
    if not all(weight.is_contiguous() for weight in slices):
        raise ValueError(f"the stacked weights {name} must be contiguous")


def rows_to_warm_up(
    most_rows: int,
    num_active_loras: int,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
) -> list[int]:
    """Return row counts that together make every kernel a number of rows up to this can need.

    Triton compiles a kernel when a configuration is first launched, which takes most of a
    second (vLLM issues 8559, 43009). The number of groups is warmed up count by count anyway.
    """
    width, columns = lora_a[0].shape[2], sum(b.shape[1] for b in lora_b)
    seen: dict[tuple[int, ...], int] = {}
    for rows in range(1, most_rows + 1):
        splits = int(splits_of(rows, len(lora_a), width, lora_a[0].device))
        shrink = shrink_launch(rows, num_active_loras, width, RANK_BLOCK, splits, lora_a[0])
        expand = expand_launch(rows, num_active_loras, columns, RANK_BLOCK, lora_b[0])
        key = (
            *(shrink.block_m, shrink.groups, shrink.block_k, shrink.steps),
            *(expand.block_m, next_power_of_2(splits)),
        )
        seen.setdefault(key, rows)
        if splits == 1 and rows > 64 * num_active_loras:
            break  # the largest tiles, and nothing is split: more rows change nothing
    return sorted(seen.values())
