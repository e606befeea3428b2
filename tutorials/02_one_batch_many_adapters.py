# %% [markdown]
# # 2. One batch, many adapters
#
# [Tutorial 1](01_lora_in_ten_lines.md) ended with a sum that serves every row of a batch from its
# own adapter, computed by a loop over rows. That loop is right and slow. Here we try the obvious
# ways to be rid of it, see each one fail, and arrive at the *routing tables* that every LoRA op
# of minilora reads.
#
# **You will learn**
#
# - why a gather, a mask and a selection of rows are each a trap;
# - how to sort the rows by adapter, and why `-1` must never be a group;
# - the five arrays of `KernelMeta`, built by hand in NumPy.
#
# **You need** [tutorial 1](01_lora_in_ten_lines.md). Fifteen minutes to read, five seconds to run,
# on a CPU.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from minilora.graphs import CaptureError, RecordedBackend
from minilora.ops import KernelMeta, lora_expand, lora_shrink

torch.manual_seed(0)
np.set_printoptions(precision=2, suppress=True)

# %% [markdown]
# ## The batch
#
# Three rows: row 0 has adapter A, which lies in slot 2; row 1 has none; row 2 has adapter B, in
# slot 0. A fourth row is *padding*: graphs, which later tutorials are about, exist for a few sizes
# only, so a step is filled up to the next one. `token_lora_mapping` gives the slot of each row,
# -1 for none.
#
# There are four slots. Slot 3 holds an adapter C that nobody uses now. Slot 1 has never been
# written. We fill it and the padding row with NaN (not a number), so that whoever reads them is
# found out. `max_loras` is the number of slots.

# %%
T, width, outs, rank, max_loras = 4, 6, 5, 2, 4
token_lora_mapping = np.array([2, -1, 0, -1])
x = torch.randn(T, width)
lora_a = torch.randn(max_loras, rank, width)  # [max_loras, r, in]
lora_b = torch.randn(max_loras, outs, rank)  # [max_loras, out, r], scaling folded in
base = torch.randn(T, outs)  # stands for x Wᵀ, the one product that all rows share
x[3] = base[3] = torch.nan
lora_a[1] = lora_b[1] = torch.nan

# %% [markdown]
# ## A loop over rows: right, and slow
#
# This is our reference. It makes two small products for each row, so a batch of 2,048 rows is
# 4,096 launches, and rows that share an adapter each read its weights anew.

# %%
right = base.clone()
for row, slot in enumerate(token_lora_mapping):
    if slot >= 0:
        h = lora_a[slot] @ x[row]  # [r]
        right[row] += lora_b[slot] @ h
print((right - base)[:, :3].numpy())

# %% [markdown]
# ## A gather: row 1 gets somebody's adapter
#
# Index the stacks with the mapping, and every row has an A of its own: one batched product and no
# loop. Predict: what will row 1, whose slot is -1, get?

# %%
slots = torch.from_numpy(token_lora_mapping)
h = torch.einsum("tri,ti->tr", lora_a[slots], x)
wrapped = base + torch.einsum("tor,tr->to", lora_b[slots], h)
print("row 1, right:   ", right[1].numpy())
print("row 1, gathered:", wrapped[1].numpy())
print("with adapter C: ", (base[1] + lora_b[3] @ (lora_a[3] @ x[1])).numpy())

# %% [markdown]
# An index of -1 means the *last* element, so row 1 got adapter C. Nothing complained. The mend is
# to gather any valid slot and to throw the result away where there is no adapter:

# %%
update = torch.einsum("tor,tr->to", lora_b[slots.clamp(min=0)], h)
gathered = torch.where((slots >= 0)[:, None], base + update, base)
print("equal now:", torch.allclose(gathered, right, equal_nan=True))

# %% [markdown]
# Right, and still not good: the gather *copies* an A and a B for every row. In a prompt of 2,048
# rows of a 4096-wide layer with rank 16 in bfloat16 that is this much, for one projection:

# %%
copied = 2048 * 16 * (4096 + 4096) * 2  # rows, rank, in and out, bytes
print(f"copied: {copied / 1e6:.0f} MB; four adapters hold {copied / 512 / 1e6:.0f} MB")

# %% [markdown]
# ## A loop over adapters, with masks: NaN everywhere
#
# Now go over the slots, compute every row with each, and multiply by 0 where the row is another's.
# Predict: which rows will be right?

# %%
masked = base.clone()
for slot in range(max_loras):
    own = (slots == slot).float()[:, None]  # [T, 1]
    masked += own * (x @ lora_a[slot].T) @ lora_b[slot].T
print("row 0:", masked[0].numpy(), "right is", right[0].numpy())
print("rows that hold NaN:", masked.isnan().any(dim=1).nonzero()[:, 0].tolist())

# %% [markdown]
# None. Slot 1 holds NaN, and $0 \times \mathrm{NaN}$ is NaN: a mask must *choose*, not multiply.
# This trap comes back with padding, and in attention ([hazards](../hazards.md)).

# %%
masked = base.clone()
for slot in range(max_loras):
    update = (x @ lora_a[slot].T) @ lora_b[slot].T
    masked = torch.where((slots == slot)[:, None], masked + update, masked)
print("equal now:", torch.allclose(masked, right, equal_nan=True))

# %% [markdown]
# Right again. But each row was computed `max_loras` times, for one result that is kept at most.
#
# ## Selecting the rows: not with a graph
#
# `x[slots == slot]` computes each row once. How many rows it returns is then a matter of the
# *values* in `slots`. The host must wait for the device to tell it, and a CUDA graph (a recorded
# list of launches, see [the invariant](../invariant.md)) cannot hold it: at replay no Python runs
# that could choose another shape. minilora's recorder stands for such a graph on a CPU, and
# refuses:

# %%
graphs = RecordedBackend({"x": x, "slots": slots, "lora_a": lora_a})
try:
    graphs.capture(lambda: x[slots == 2] @ lora_a[2].T)
    refused = ""
except CaptureError as error:
    refused = str(error).split(": ", 1)[1]  # the line of code comes first
print(refused)

# %% [markdown]
# ## Routing tables
#
# So we want tables with shapes that never change and values that do. Sort the row numbers by slot,
# and the rows of an adapter lie side by side. A run of equal slots is a *group*. A kernel is then
# launched with a *grid* of one program a group, and each program looks up its rows.
#
# The size of the grid is frozen in a graph, so it must be known beforehand. It is the number of
# adapters in the batch, `num_active_loras`, here 2. First attempt: the groups are the different
# values of the mapping.

# %%
num_active_loras = len({slot for slot in token_lora_mapping if slot >= 0})
groups, rows_in_group = np.unique(token_lora_mapping, return_counts=True)
order = np.argsort(token_lora_mapping, kind="stable")
start = np.concatenate([[0], np.cumsum(rows_in_group)])
print("groups:", groups, "rows in each:", rows_in_group, "sorted rows:", order)


# %% [markdown]
# And this is what a kernel does with the tables, each turn of the loop being one program. Predict,
# with a grid of 2: which row is wrong?


# %%
def run_grid(grid: int, groups, order, start) -> torch.Tensor:
    out = base.clone()
    for program in range(grid):
        slot = groups[program]
        rows = torch.from_numpy(order[start[program] : start[program + 1]]).long()
        if slot >= 0:
            h = x[rows] @ lora_a[slot].T  # shrink
            out[rows] += h @ lora_b[slot].T  # expand
    return out


dropped = run_grid(num_active_loras, groups, order, start)
for row in range(3):
    print(f"row {row}: {dropped[row, :3].numpy()}, right is {right[row, :3].numpy()}")

# %% [markdown]
# Row 0 has lost adapter A. `-1` sorts first, so it took one of the two programs, and the last
# group had none left. Its user gets the base model's answer, fluent and wrong. vLLM 0.24.0 with
# graphs by the number of adapters (#32005) did this in some mixed batches
# ([how a step chooses its graph](../dispatch.md#why-1-is-never-a-group)).
#
# ## `-1` is never a group
#
# The mend: give `-1` the largest sort key, so that its rows come last, and count only real slots.
# The arrays by group have `max_loras` places, filled up with -1 and 0. The shapes never change.

# %%
key = np.where(token_lora_mapping < 0, max_loras, token_lora_mapping)  # -1 sorts last
token_indices_sorted_by_lora_ids = np.argsort(key, kind="stable")
rows_of_slot = np.bincount(key, minlength=max_loras + 1)[:max_loras]  # the -1 rows cut off
active = rows_of_slot.nonzero()[0]
active_lora_ids = np.full(max_loras, -1)
active_lora_ids[: len(active)] = active
num_tokens_per_lora = np.zeros(max_loras, dtype=int)
num_tokens_per_lora[: len(active)] = rows_of_slot[active]
lora_token_start_loc = np.concatenate([[0], np.cumsum(num_tokens_per_lora)])
by_hand = {
    "token_lora_mapping": token_lora_mapping,
    "token_indices_sorted_by_lora_ids": token_indices_sorted_by_lora_ids,
    "active_lora_ids": active_lora_ids,
    "num_tokens_per_lora": num_tokens_per_lora,
    "lora_token_start_loc": lora_token_start_loc,
}
for name, table in by_hand.items():
    print(f"{name:33} {table.tolist()}")

# %% [markdown]
# Read a program from the tables: program 1 serves slot `active_lora_ids[1]`, with the
# `num_tokens_per_lora[1]` sorted rows that begin at `lora_token_start_loc[1]`.

# %%
figure, ax = plt.subplots(figsize=(7, 3))
color = {0: "tab:blue", 2: "tab:orange", -1: "0.5"}
who = ["A", "none", "B", "padding"]
for place, row in enumerate(token_indices_sorted_by_lora_ids):
    mine = color[token_lora_mapping[row]]
    ax.plot([0, 1], [row, place], "o-", color=mine, markersize=12, linewidth=2)
    ax.text(
        -0.08, row, f"row {row}, {who[row]}: {token_lora_mapping[row]}", ha="right", va="center"
    )
    ax.text(1, place - 0.22, f"row {row}", ha="center", va="bottom")
for g, slot in enumerate(active_lora_ids):
    ends = lora_token_start_loc[g : g + 2]
    text = f"program {g}: slot {slot}, sorted[{ends[0]}:{ends[1]}]"
    ax.text(2.08, g, text if slot >= 0 else f"group {g}: empty", va="center")
    for place in range(*ends):
        ax.plot([1, 2], [place, g], "o-", color=color[slot], markersize=12, linewidth=2)
for at, title in enumerate(["mapping", "sorted rows", "active_lora_ids"]):
    ax.text([-0.1, 1, 2.1][at], -0.8, title, ha=["right", "center", "left"][at], style="italic")
ax.set(xlim=(-1.1, 3.9), ylim=(3.4, -0.9))
ax.axis("off")
plt.show()

# %% [markdown]
# The same grid of 2, on the new tables:

# %%
grouped = run_grid(
    num_active_loras, active_lora_ids, token_indices_sorted_by_lora_ids, lora_token_start_loc
)
print("equal:", torch.allclose(grouped, right, equal_nan=True))
too_large = run_grid(
    max_loras, active_lora_ids, token_indices_sorted_by_lora_ids, lora_token_start_loc
)
print("equal with a grid of 4:", torch.allclose(too_large, right, equal_nan=True))

# %% [markdown]
# Each row was computed once, each A and B was read once a group, no weight was copied, and no shape
# depends on a value. A grid that is too large does no harm: its programs find slot -1 and stop.
#
# ## How minilora does it
#
# `minilora/ops/kernel_meta.py` makes these tables, on the host, in one allocation, and sends them
# to the device in one copy. The buffer below has room for eight rows; the step shows four of them.
# `prepare` writes *every* place of every table, so nothing of an older step can be left.

# %%
meta = KernelMeta(max_tokens=8, max_loras=max_loras)
meta.prepare([0, 1, 1, 3, 2, 2, 2, 2], num_tokens_padded=8, num_active_loras=4)  # an older step
meta.prepare([2, -1, 0], num_tokens_padded=4, num_active_loras=2)
for name in by_hand:
    print(f"{name:33} {getattr(meta, name).tolist()}")

# %% [markdown]
# A grid that is too small for its step is refused on the host, since a kernel could only drop rows
# in silence. The ops `lora_shrink` (`minilora/ops/shrink.py`) and `lora_expand`
# (`minilora/ops/expand.py`) take the tables and the size of the grid, and nothing else decides.

# %%
try:
    meta.prepare([2, -1, 0], num_tokens_padded=4, num_active_loras=1)
    refused_grid = ""
except ValueError as error:
    refused_grid = str(error)
print(refused_grid)
meta.prepare([2, -1, 0], num_tokens_padded=4, num_active_loras=2)
out = base.clone()
h = lora_shrink(x, [lora_a], meta, num_active_loras)
lora_expand(h, [lora_b], out, meta, num_active_loras)
print("equal:", torch.allclose(out, right, equal_nan=True))

# %% [markdown]
# ## On a GPU
#
# One prompt step of 2,048 rows and four adapters, for each group of projections of a Llama-3.1-8B:
# minilora's kernels, the gather, and the loop over adapters, in microseconds.

# %%
measured = json.loads(Path("docs/benchmarks/h200-kernels.json").read_text())
print(measured["machine"], measured["date"], "", sep="\n")
print("projections    tables    gather    loop over adapters")
for line in measured["prefill 2048 rows, 4 adapters"]:
    ours, gather, loop = line["ours"], line["gather_einsum"], line["adapter_loop"]
    print(f"{line['group']:12} {ours:8.0f} {gather:9.0f} {loop:13.0f}")

# %% [markdown]
# ## Check
#
# The running example, then 200 random batches: by hand and by `KernelMeta` must agree in each.

# %%
assert not torch.allclose(wrapped[1], right[1]), "an index of -1 gave row 1 an adapter"
for result in (gathered, masked, grouped, too_large, out):
    torch.testing.assert_close(result, right, equal_nan=True)
assert torch.equal(dropped[0], base[0]), "with -1 as a group, row 0 loses its adapter"
assert torch.equal(out[1], base[1]), "a row without an adapter is untouched, bit for bit"
assert "mask" in refused, "the recorder refuses a shape that comes from values"
assert "drop rows" in refused_grid
for name, table in by_hand.items():
    assert getattr(meta, name).tolist() == table.tolist(), name
draw = np.random.default_rng(0)
for _ in range(200):
    mapping = draw.integers(-1, max_loras, size=draw.integers(1, 9))
    meta.prepare(mapping, len(mapping), max_loras)
    key = np.where(mapping < 0, max_loras, mapping)
    counts = np.bincount(key, minlength=max_loras + 1)[:max_loras]
    assert meta.token_indices_sorted_by_lora_ids.tolist() == key.argsort(kind="stable").tolist()
    assert [s for s in meta.active_lora_ids.tolist() if s >= 0] == counts.nonzero()[0].tolist()
    assert [n for n in meta.num_tokens_per_lora.tolist() if n] == counts[counts > 0].tolist()

# %% [markdown]
# ## What you have seen
#
# An index of -1 reads the last slot, a mask that multiplies spreads NaN, a selection has no fixed
# shape. Rows sorted by slot, with real adapters only as groups, have none of these faults.
#
# Next: [tutorial 3](03_shrink_and_expand_kernels.md) writes the two kernels that read the tables.
#
# Exercises:
#
# 1. `lora_token_start_loc` follows from another table. What does a kernel save if it is sent too?
# 2. Run the `-1`-first tables with a grid of 3. Which number would a scheduler have to be told, and
#    what would a graph captured for "2 adapters" mean for the batch `[A, B]` then?
# 3. Is the *stable* sort needed for right results? What would change from step to step without it?
