# %% [markdown]
# # 3. The shrink and expand kernels, tile by tile
#
# A *kernel* is a program of which a GPU runs many copies at once. We write the two kernels that
# serve a batch with many adapters, `shrink` ($h = x A^\top$) and `expand` (`out += h Bᵀ`), in
# Triton, a language for kernels inside Python. Its interpreter runs them on a CPU, with NumPy. So
# we can get them wrong, look at every element, and mend them.
#
# **You will learn**
#
# - what a program, a grid, a tile and a mask are, and what a missing mask does;
# - how programs find their rows when groups have unlike sizes;
# - why the split sum needs neither atomic adds nor a cleared buffer.
#
# **You need** [tutorial 2](02_one_batch_many_adapters.md) for the routing tables. Twenty minutes to
# read, some seconds to run, on a CPU. The interpreter must be chosen before Triton is imported.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import triton
import triton.language as tl
from matplotlib.colors import ListedColormap

from minilora.ops import KernelMeta

torch.manual_seed(0)
np.set_printoptions(precision=2, suppress=True)

# %% [markdown]
# ## The step
#
# The batch of all tutorials: row 0 has adapter A in slot 2, row 1 none, row 2 adapter B in slot 0,
# row 3 is padding and holds NaN. The width of 40 is no multiple of our block of 16, and neither
# are the 40 outputs. Real layers have such tails too. `h` begins with NaN everywhere, so that we
# see what nobody wrote.

# %%
T, width, columns, R, slots = 4, 40, 40, 4, 4
x, base = torch.randn(T, width), torch.randn(T, columns)
x[3] = torch.nan
a = torch.randn(slots, R, width) / width**0.5  # lora_a_stacked [max_loras, r, in]
b = torch.randn(slots, columns, R)  # lora_b_stacked [max_loras, out, r]
meta = KernelMeta(max_tokens=T, max_loras=slots)
meta.prepare([2, -1, 0], num_tokens_padded=T, num_active_loras=2)
order, active_ids = meta.token_indices_sorted_by_lora_ids, meta.active_lora_ids
counts, starts = meta.num_tokens_per_lora, meta.lora_token_start_loc
right_h = {0: x[0] @ a[2].T, 2: x[2] @ a[0].T}  # the rows with an adapter
nothing = torch.full((T, R), torch.nan)

# %% [markdown]
# ## A first shrink
#
# The *grid* is the number of programs: one for each group. `tl.program_id(0)` tells a program which
# one it is. A *tile* is the block of numbers that a program has in hand: up to `BLOCK_M` rows by
# `BLOCK_K` inputs. A tensor arrives as the address of its first element, and a tile of addresses
# is arithmetic: row times row length plus column. `tl.constexpr` marks what the compiler knows.


# %%
@triton.jit
def shrink_naive(
    x, a, h, order, active_ids, starts, width,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    slot = tl.load(active_ids + group)
    rows = tl.load(order + tl.load(starts + group) + tl.arange(0, BLOCK_M))  # [M]
    r = tl.arange(0, R)
    acc = tl.zeros((BLOCK_M, R), tl.float32)
    for k0 in range(0, width, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x_tile = tl.load(x + rows[:, None] * width + k[None, :])  # [M, K]
        a_tile = tl.load(a + slot * R * width + r[None, :] * width + k[:, None])  # [K, R]
        acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
    tl.store(h + rows[:, None] * R + r[None, :], acc)


# %% [markdown]
# (On a GPU the tiles of `tl.dot` must be larger, 8 or 16 a side; the interpreter takes any. With
# bfloat16 the interpreter's `tl.dot` returns garbage, so minilora's kernels convert both tiles to
# float32 there. Ours are float32.)
#
# Each group has one row, and the tiles have two. Predict: which rows of `h` will be written, and
# will those of rows 0 and 2 be right?

# %%
h_naive = nothing.clone()
shrink_naive[(2,)](x, a, h_naive, order, active_ids, starts, width, R=R, BLOCK_M=2, BLOCK_K=16)
for row in range(T):
    print(f"row {row}: {h_naive[row].numpy()}, right: {right_h.get(row, nothing[row]).numpy()}")

# %% [markdown]
# Three faults in one kernel, and none raised an error.
#
# - Row 1 has no adapter, and got one. A tile has two rows, its group has one: the second is what
#   comes next in `order`. Row 0 was even written by both programs; the later one won.
# - Row 0 is wrong: its third block runs over the end of the row, into row 1.
# - Row 2 is NaN: its third block runs into the padding.
#
# A kernel that marks what it touches, with a bit for each program, shows it.


# %%
@triton.jit
def mark(
    seen, order, starts, counts, width,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    group, block = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK_M)
    k = block * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(order + tl.load(starts + group) + place)
    mine = place < (tl.load(counts + group) if MASKED else BLOCK_M)
    inside = mine[:, None] & (k < (width if MASKED else width + BLOCK))[None, :]
    tl.atomic_or(seen + rows[:, None] * width + k[None, :], 1 << group, mask=inside)


seen = {masked: torch.zeros(T, width, dtype=torch.int32) for masked in (False, True)}
figure, axes = plt.subplots(2, 1, figsize=(7, 4), sharex=True)
paint = ListedColormap([(0, 0, 0, 0), "tab:blue", "tab:orange", "tab:red"])
for ax, (masked, picture) in zip(axes, seen.items(), strict=True):
    mark[(2, 3)](picture, order, starts, counts, width, BLOCK_M=2, BLOCK=16, MASKED=masked)
    ax.pcolormesh(picture.numpy(), cmap=paint, vmin=0, vmax=3)
    ax.set_yticks([1, 2, 3, 4], ["0: A", "1: none", "2: B", "3: padding"], va="bottom")
    ax.invert_yaxis()
    ax.grid(color="0.5")
    ax.set_xticks([0, 16, 32, 40])
    ax.set_title(f"x, {'with' if masked else 'without'} masks", loc="left")
axes[1].set_xlabel("blue: program 0 (B), orange: program 1 (A), red: both; lines: blocks of 16")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Masks
#
# A *mask* says which elements of a tile exist. What is masked is not read (`other` stands in for
# it) and not written. `mine` is for the rows, `inside` for the inputs. Both factors need `inside`:
# 0 from one and NaN from the other would make NaN.


# %%
@triton.jit
def shrink_masked(
    x, a, h, order, active_ids, starts, counts, width,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    slot = tl.load(active_ids + group)
    mine = tl.arange(0, BLOCK_M) < tl.load(counts + group)
    places = order + tl.load(starts + group) + tl.arange(0, BLOCK_M)
    rows = tl.load(places, mask=mine, other=0)
    r = tl.arange(0, R)
    acc = tl.zeros((BLOCK_M, R), tl.float32)
    for k0 in range(0, width, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        inside = k < width
        x_mask = mine[:, None] & inside[None, :]
        x_tile = tl.load(x + rows[:, None] * width + k[None, :], mask=x_mask, other=0.0)
        a_tiles = a + slot * R * width + r[None, :] * width + k[:, None]
        a_tile = tl.load(a_tiles, mask=inside[:, None], other=0.0)
        acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
    tl.store(h + rows[:, None] * R + r[None, :], acc, mask=mine[:, None])


h_masked = nothing.clone()
args = (order, active_ids, starts, counts, width)
shrink_masked[(2,)](x, a, h_masked, *args, R=R, BLOCK_M=2, BLOCK_K=16)
for row, right in right_h.items():
    print(f"row {row}: {h_masked[row].numpy()}, right: {right.numpy()}")

# %% [markdown]
# ## Groups of unlike sizes
#
# One program a group serves `BLOCK_M` rows of it and drops the rest. Five rows of A would need
# three programs. But how many programs a step needs must not depend on how its rows are spread,
# since a graph freezes the grid. The answer: number the *tiles* through the groups. Of T rows in n
# groups there are at most $\lceil T / M \rceil + n - 1$ tiles of $M$ rows. Launch that many; each
# program adds up the groups' tiles to find its own. In Python, for nine rows:

# %%
skewed = [2, 2, 0, 2, -1, 2, 2, 0, 0]  # five rows of A, three of B
meta_9 = KernelMeta(max_tokens=9, max_loras=slots)
meta_9.prepare(skewed, num_tokens_padded=9, num_active_loras=2)
num_tiles = -(-9 // 2) + 2 - 1
dealt = []
for tile in range(num_tiles):
    group, first = 0, 0  # first: the number of this group's first tile
    while group < 2 and tile >= first + -(-int(meta_9.num_tokens_per_lora[group]) // 2):
        first += -(-int(meta_9.num_tokens_per_lora[group]) // 2)
        group += 1
    begin = int(meta_9.lora_token_start_loc[group]) + 2 * (tile - first)
    end = min(begin + 2, int(meta_9.lora_token_start_loc[min(group + 1, 2)]))
    rows = meta_9.token_indices_sorted_by_lora_ids[begin:end].tolist()
    dealt += rows
    print(f"program {tile}: slot {int(meta_9.active_lora_ids[group])}, rows {rows}")

# %% [markdown]
# The last program finds no group, slot -1, and stops. `rows_by_tile` in
# `minilora/ops/triton/routing.py` does the same without a loop, and our next kernels call it.
#
# ## Split-K
#
# In decode there are few rows, so few programs, and each walks along a width of thousands: most of
# a GPU idles. *Split-K* gives each part of the width to a program of its own. Then the parts of one
# element must be added. By whom? `HOW` tries three ways.
#
# (`rows_by_tile` returns slot, rank, rows and mask of a tile. It takes its number, the tables, the
# slots' ranks, how many groups there are, `R`, `BLOCK_M`, and the room for groups, 4. All our
# ranks are `R`: the last argument, `False`, says so, and `counts` stands where ranks would be.)

# %%
from minilora.ops.triton.routing import rows_by_tile


@triton.jit
def shrink_split(
    x, a, h, order, active_ids, counts, num_tokens, num_active, width,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0), tl.program_id(1)
    slot, _, rows, mine = rows_by_tile(
        tile, active_ids, counts, order, counts, num_active, R, BLOCK_M, 4, False
    )
    if slot < 0:
        return
    r, k = tl.arange(0, R), split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < width
    x_mask = mine[:, None] & inside[None, :]
    x_tile = tl.load(x + rows[:, None] * width + k[None, :], mask=x_mask, other=0.0)
    a_tiles = a + slot * R * width + r[None, :] * width + k[:, None]
    a_tile = tl.load(a_tiles, mask=inside[:, None], other=0.0)
    part = tl.dot(x_tile, a_tile, input_precision="ieee")
    h_tile = h + rows[:, None] * R + r[None, :]
    if HOW == "planes":
        h_tile += split * num_tokens * R  # a place of its own for each split
    if HOW == "add":
        tl.atomic_add(h_tile, part, mask=mine[:, None])
    else:
        tl.store(h_tile, part, mask=mine[:, None])


# %% [markdown]
# First a plain store, then atomic adds (an add that no other program can interrupt). The second is
# run twice on the same buffer, as a graph does, and then on memory that holds NaN. Predict the
# three results of "add".

# %%
tables, grid = (order, active_ids, counts), (3, 3)  # 3 splits; 3 tiles at most, one is idle
blocks = {"R": R, "BLOCK_M": 2, "BLOCK_K": 16}
h_stored, h_added = torch.zeros(T, R), torch.zeros(T, R)
shrink_split[grid](x, a, h_stored, *tables, T, 2, width, **blocks, HOW="store")
print("right:       ", right_h[0].numpy())
print("stored:      ", h_stored[0].numpy())
shrink_split[grid](x, a, h_added, *tables, T, 2, width, **blocks, HOW="add")
added_once = h_added.clone()
print("added:       ", added_once[0].numpy())
shrink_split[grid](x, a, h_added, *tables, T, 2, width, **blocks, HOW="add")
print("added again: ", h_added[0].numpy())
h_poisoned = nothing.clone()
shrink_split[grid](x, a, h_poisoned, *tables, T, 2, width, **blocks, HOW="add")
print("added to NaN:", h_poisoned[0].numpy())

# %% [markdown]
# The store keeps whichever split came last. The add is right once, on a cleared buffer; then
# somebody has to clear it, inside the graph, each time (vLLM #25914 is about who and when). And it
# has a second fault, which the interpreter cannot show, since it runs one program after the other:
# on a GPU, the order of the adds differs from run to run, and floats depend on it.
#
# The third way gives each split a *plane* of its own, `h [splits, T, r]`. Nobody adds, so nothing
# must be clear. Let it begin with NaN, and add the planes in two orders:

# %%
h_planes = torch.full((3, T, R), torch.nan)
shrink_split[grid](x, a, h_planes, *tables, T, 2, width, **blocks, HOW="planes")
forward = (h_planes[0] + h_planes[1]) + h_planes[2]
backward = (h_planes[2] + h_planes[1]) + h_planes[0]
print("planes:      ", forward[0].numpy())
moved = (forward != backward)[[0, 2]].sum().item()
print(f"numbers whose bits depend on the order: {moved} of {2 * R}")

# %% [markdown]
# ## Expand
#
# `expand` adds the planes as it loads them, always in the same order: so the same bits, every time.
# A program owns a tile of the output, some rows by `BLOCK_N` columns, and adds in place. `end` is
# where it takes the columns to end. We first call it with 48, the end of the last block, and then
# with 40. Predict: what will a user without an adapter, row 1, notice of the first?


# %%
@triton.jit
def expand(
    h, b, out, order, active_ids, counts, num_tokens, num_active, columns, end,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    slot, _, rows, mine = rows_by_tile(
        tile, active_ids, counts, order, counts, num_active, R, BLOCK_M, 4, False
    )
    if slot < 0:
        return
    r, n = tl.arange(0, R), block * BLOCK_N + tl.arange(0, BLOCK_N)
    h_sum = tl.zeros((BLOCK_M, R), tl.float32)
    for split in range(SPLITS):
        h_tile = h + split * num_tokens * R + rows[:, None] * R + r[None, :]
        h_sum += tl.load(h_tile, mask=mine[:, None], other=0.0)
    b_tiles = b + slot * columns * R + n[None, :] * R + r[:, None]
    b_tile = tl.load(b_tiles, mask=(n < end)[None, :], other=0.0)  # [R, N]
    tiles = out + rows[:, None] * columns + n[None, :]
    inside = mine[:, None] & (n < end)[None, :]
    before = tl.load(tiles, mask=inside, other=0.0)
    tl.store(tiles, before + tl.dot(h_sum, b_tile, input_precision="ieee"), mask=inside)


# %%
out = {}
for end in (48, 40):
    out[end] = base.clone()
    sizes = (T, 2, columns, end)
    expand[(3, 3)](h_planes, b, out[end], *tables, *sizes, R=R, BLOCK_M=2, BLOCK_N=16, SPLITS=3)
    touched = (out[end] != base).any(dim=1).nonzero()[:, 0].tolist()
    print(f"end {end}: rows changed {touched}; columns of row 1:", end=" ")
    print((out[end] != base)[1].nonzero()[:, 0].tolist())

# %% [markdown]
# With 48, the last block of row 0 runs on into the first eight columns of row 1, and of row 2 into
# row 3. Rows without an adapter must be untouched, *bit for bit*: with the right end they are.
#
# A map of both kernels. In each picture a colour is one program: two tiles by three splits in
# shrink, two tiles by three blocks of columns in expand.

# %%
figure, axes = plt.subplots(1, 3, figsize=(8, 2.4), width_ratios=[5, 3, 5])
picture = torch.full((T, width), torch.nan)
for row in right_h:
    picture[row] = torch.arange(width) // 16 + (3 if row == 0 else 0)
of_h = torch.full((T, 3), torch.nan)
of_h[[0, 2]] = torch.tensor([[3.0, 4, 5], [0, 1, 2]])
titles = ("shrink reads x", "h: a plane for each split", "expand adds into out")
for ax, title, tile_map in zip(axes, titles, (picture, of_h, picture), strict=True):
    ax.pcolormesh(tile_map.numpy(), cmap="tab10", vmin=0, vmax=9)
    ax.hlines(range(5), 0, tile_map.shape[1], color="0.5", linewidth=0.5)
    ax.set_yticks([0.5, 1.5, 2.5, 3.5], ["A", "none", "B", "padding"])
    ax.invert_yaxis()
    ax.set_title(title, fontsize=10)
axes[1].set_xticks([0.5, 1.5, 2.5], ["0", "1", "2"])
figure.tight_layout()
plt.show()

# %% [markdown]
# ## How minilora does it
#
# `minilora/ops/triton/shrink.py` and `expand.py` are these kernels, with three slices in a launch
# (q, k and v), ranks of its own for each slot, 64-bit row offsets and block sizes from a table
# (`launch.py`). In steps of up to eight rows a program looks for its rows in the mapping instead
# (`rows_by_mapping`): fewer reads wait for each other. They run in the interpreter too. The ops
# that the model calls, `lora_shrink` and `lora_expand`, are plain PyTorch on a CPU. All three must
# agree, on the running example and on the nine rows.

# %%
from minilora.ops import lora_expand, lora_shrink
from minilora.ops.triton import expand as real_expand
from minilora.ops.triton import shrink as real_shrink
from minilora.ops.triton.launch import Routing

results = {}
for name, m, x_in in (("running example", meta, x), ("nine rows", meta_9, torch.randn(9, width))):
    rows = len(x_in)
    ours, real, plain = torch.zeros(3, rows, columns)
    three = torch.full((3, rows, R), torch.nan)
    t = (m.token_indices_sorted_by_lora_ids, m.active_lora_ids, m.num_tokens_per_lora)
    tiles = -(-rows // 2) + 2 - 1
    shrink_split[(3, tiles)](x_in, a, three, *t, rows, 2, width, **blocks, HOW="planes")
    sizes = (rows, 2, columns, columns)
    expand[(3, tiles)](three, b, ours, *t, *sizes, R=R, BLOCK_M=2, BLOCK_N=16, SPLITS=3)
    routing = Routing(*m.tables)
    h_real = real_shrink.shrink(x_in, [a], routing, None, 2)
    real_expand.expand(h_real, [b], real, routing, None, 2)
    lora_expand(lora_shrink(x_in, [a], m, 2), [b], plain, m, 2)
    results[name] = ours, real, plain
    print(f"{name}: largest difference {max((ours - o).abs().max() for o in (real, plain)):.0e}")

# %% [markdown]
# ## On a GPU
#
# `shrink_atomic.py` beside them keeps the classical way for comparison: atomic adds, a buffer
# cleared inside the op, a launch for each slice. One layer's shrinks and expands, in microseconds:

# %%
measured = json.loads(Path("docs/benchmarks/h200-kernels.json").read_text())
print(measured["machine"], measured["date"], "", sep="\n")
print("rows  adapters  planes  atomic adds")
for line in measured["decode"]:
    if "atomic" in line:
        print("{rows:4} {adapters:9} {layer:7.1f} {atomic:12.1f}".format(**line))

# %% [markdown]
# ## Check

# %%
for row, right in right_h.items():
    assert not torch.allclose(h_naive[row], right), "without a mask the tail is wrong"
    for h in (h_masked, added_once, forward):
        torch.testing.assert_close(h[row], right)
    assert not torch.allclose(h_stored[row], right)
    torch.testing.assert_close(h_added[row], 2 * right)
    assert h_poisoned[row].isnan().all()
assert not h_naive[1].isnan().any(), "without a mask a row of no group is written"
assert h_masked[[1, 3]].isnan().all(), "with one, it is not"
assert (seen[False] == 3).any(), "two programs touched the same element"
assert not (seen[True] == 3).any(), "with masks, none did"
assert sorted(dealt) == [row for row, slot in enumerate(skewed) if slot >= 0]
assert moved > 0, "the order of a sum of floats is seen in its bits"
assert torch.equal(out[40][[1, 3]], base[[1, 3]]), "rows of no group are untouched"
assert not torch.equal(out[48][1], base[1])
again = base.clone()
expand[(3, 3)](h_planes, b, again, *tables, T, 2, columns, 40, R=R, BLOCK_M=2, BLOCK_N=16, SPLITS=3)
assert torch.equal(again, out[40]), "the same bits in every run"
for ours, real, plain in results.values():
    torch.testing.assert_close(ours, real)
    torch.testing.assert_close(ours, plain)
    assert ours.abs().sum() > 0

# %% [markdown]
# ## What you have seen
#
# Programs find their rows in the routing tables; masks keep a tile inside its rows, its inputs and
# its columns; each split writes a place of its own, and expand adds them in a fixed order.
# [The kernels](../kernels.md) has what is left out here: slices, ranks, early launch.
#
# Next: [tutorial 4](04_a_graph_recorder.md) freezes launches in a graph.
#
# Exercises:
#
# 1. Remove `mask=inside[:, None]` from the load of A in `shrink_masked`. Why is the result still
#    right? Write NaN to slots 1 and 3 and try again.
# 2. Let `shrink_masked` take the nine rows, with a grid of 2. Which rows stay NaN?
# 3. `rows[:, None] * width` is a 32-bit product. From how many rows of a layer 14,336 wide on is it
#    wrong?
