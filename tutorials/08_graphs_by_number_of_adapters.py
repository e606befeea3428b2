# %% [markdown]
# # 8. Graphs by number of adapters
#
# A LoRA kernel starts programs for each adapter of the batch: its *grid* has a place for each. A
# graph freezes the grid. Captured for four adapters, it starts programs for four, also when one
# is active. vLLM #32005 therefore captures graphs for several counts and chooses by the number of
# adapters in the step. That brings a new way to be wrong, which was in a released version: in
# some mixed batches the last adapter is dropped, in silence.
#
# **You will learn**
#
# - what a grid that is too large does, and what one that is too small does;
# - which counts to capture, and how to round up between them;
# - how rows *without* an adapter made the count wrong, and why `-1` must never be a group.
#
# **You need** [tutorial 2](02_one_batch_many_adapters.md) (routing tables) and [tutorial
# 7](07_a_second_set_of_graphs.md). Fifteen minutes to read, five seconds to run, on a CPU.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from minilora.graphs import GraphDispatcher, RecordedBackend

torch.manual_seed(0)
ROWS, WIDTH, RANK, SLOTS = 4, 8, 2, 4
x = torch.randn(ROWS, WIDTH)  # [T, in]
a_stacked = torch.randn(SLOTS, RANK, WIDTH)  # [L, r, in]
b_stacked = torch.randn(SLOTS, WIDTH, RANK)  # [L, out, r]

# %% [markdown]
# ## A grid in slow motion
#
# This function does what a LoRA kernel does, one program after another. Its tables are fixed
# tensors; the number of programs is a Python number, as the grid of a launch is. Each program
# looks up its group's slot. To be readable it computes on all rows and keeps those of its group.

# %%
mapping = torch.full((ROWS,), -1)  # the slot of each row
groups = torch.full((SLOTS + 1,), -1)  # the slot of each group


def lora(grid: int) -> torch.Tensor:
    out = torch.zeros(ROWS, WIDTH)
    for program in range(grid):
        slot = groups[program : program + 1]  # [1], read on the device
        index = slot.clamp(min=0)
        a, b = a_stacked.index_select(0, index)[0], b_stacked.index_select(0, index)[0]
        mine = ((mapping == slot) & (slot >= 0))[:, None]
        out = torch.where(mine, x @ a.T @ b.T, out)
    return out


def right(slots: list[int]) -> torch.Tensor:
    out = torch.zeros(ROWS, WIDTH)
    for row, slot in enumerate(slots):
        if slot >= 0:
            out[row] = b_stacked[slot] @ (a_stacked[slot] @ x[row])
    return out


def served(out: torch.Tensor, slots: list[int]) -> list[str]:
    same = torch.isclose(out, right(slots), atol=1e-5).all(dim=1)
    return ["right" if ok else "WRONG" for ok in same.tolist()]


# %% [markdown]
# ## Naive: one grid, frozen by the first batch
#
# Capture with two adapters in the batch, as it happens to be. Then three come. Predict which row
# is wrong.


# %%
def write(slots: list[int], listed: list[int]) -> None:
    mapping.copy_(torch.tensor(slots + [-1] * (ROWS - len(slots))))
    groups.copy_(torch.tensor(listed + [-1] * (SLOTS + 1 - len(listed))))


static = {"x": x, "a": a_stacked, "b": b_stacked, "mapping": mapping, "groups": groups}
backend = RecordedBackend(static)
graphs = {grid: backend.capture(lambda grid=grid: lora(grid)) for grid in (1, 2, 4)}

three = [2, 0, 3, -1]
write(three, sorted(set(three) - {-1}))
too_small = served(graphs[2].replay(), three)
print("three adapters, grid of 2:", too_small)
just_right = served(graphs[4].replay(), three)
print("three adapters, grid of 4:", just_right)

# %% [markdown]
# The grid of two served slots 0 and 2, the first two groups; slot 3 got nothing. The grid of four
# has a program too many, which finds `-1` and does nothing: too large is right, and only wastes
# programs. So: capture several counts, and **round up**.
#
# ## Which counts?
#
# Powers of two, and the most that can occur. More adapters than slots, rows or requests cannot
# occur, so nothing is captured for them. Here is the rule in three lines, and minilora's
# dispatcher beside it.


# %%
def counts(max_loras: int, rows: int, max_num_seqs: int) -> list[int]:
    bound = min(max_loras, rows, max_num_seqs)
    powers = [2**k for k in range(10) if 2**k < bound]
    return [0, *powers, bound]  # 0: the graph without LoRA


dispatcher = GraphDispatcher(
    graph_mode="full", max_num_seqs=16, max_num_batched_tokens=64, max_loras=6
)
captured: dict[int, list[int]] = {}
for key in dispatcher.keys:
    captured.setdefault(key.descriptor.num_tokens, []).append(key.descriptor.num_active_loras)
agree = []
for rows in sorted(captured):
    agree.append(sorted(captured[rows]) == counts(6, rows, 16))
    print(f"{rows:2} rows: counts {sorted(captured[rows])}")

# %% [markdown]
# A step takes the smallest graph that has room for its rows and its adapters. As a map: each
# colour is one graph, and a step in its area runs with it.

# %%
area = np.full((7, 16), np.nan)
names = {key.descriptor: index for index, key in enumerate(dispatcher.keys)}
for rows in range(1, 17):
    for adapters in range(min(6, rows) + 1):
        chosen = dispatcher.dispatch(rows, adapters, uniform=True).descriptor
        area[adapters, rows - 1] = (names[chosen] * 7) % 20
fig, ax = plt.subplots(figsize=(8, 3.2))
ax.imshow(area, cmap="tab20", origin="lower", aspect="auto", extent=(0.5, 16.5, -0.5, 6.5))
for descriptor in names:
    rows, groups_of = descriptor.num_tokens, descriptor.num_active_loras
    ax.text(rows, groups_of, f"{rows}x{groups_of}", ha="center", va="center", fontsize=7, color="k")
ax.set(xlabel="rows of the step", ylabel="adapters of the step")
ax.set_title("The graph of a decode step (rows x groups, written where it fits exactly)", size=10)
plt.show()

# %% [markdown]
# ## The batch that drops its last adapter
#
# Now the fault. Sort the rows by slot, and call each run of equal slots a group: an easy way to
# make the tables. Rows without an adapter have slot -1, so they are a group too, and -1 sorts
# first. The kernel skips it; nothing looks wrong.
#
# The graph, though, is chosen by the number of *adapters*. Take the batch [A, none, B] of the
# running example, A in slot 2 and B in slot 0. Predict: how many groups are there, which grid is
# chosen, and who is served?


# %%
def groups_with_none(slots: list[int]) -> list[int]:
    return sorted(set(slots))


def groups_of_adapters(slots: list[int]) -> list[int]:
    return sorted(set(slots) - {-1})


def grid_for(slots: list[int]) -> int:
    adapters = len(set(slots) - {-1})
    return next(count for count in (1, 2, 4) if count >= adapters)


def serve(slots: list[int], listed: list[int]) -> list[str]:
    write(slots, listed)
    return served(graphs[grid_for(slots)].replay(), slots)


example = [2, -1, 0]
naive = serve(example, groups_with_none(example))
print("groups", groups_with_none(example), "grid", grid_for(example), naive[:3])
mended = serve(example, groups_of_adapters(example))
print("groups", groups_of_adapters(example), "grid", grid_for(example), mended[:3])

# %% [markdown]
# Three groups, a grid of two: -1 and slot 0 are served, slot 2 is dropped. Row 0 gets the answer
# of the base model.
#
# It depends on the batch, which is why it survived. Predict for each of these whether the naive
# tables are right.

# %%
batches = {
    "[A, none, B]": [2, -1, 0],
    "[A, none, none, none]": [2, -1, -1, -1],
    "[A, B]": [2, 0],
    "[A, B, none, C]": [2, 0, -1, 3],
    "[A, A, A, A]": [2, 2, 2, 2],
}
verdicts = {}
for name, slots in batches.items():
    verdicts[name] = "WRONG" not in serve(slots, groups_with_none(slots))
    print(f"{name:22} {'right' if verdicts[name] else 'an adapter is dropped'}")

# %% [markdown]
# Batches without base rows are right (and those of base rows alone, which run without LoRA). So is
# [A, B, none, C]: its three adapters round up to a grid of four, which happens to have room for
# the extra group. Wrong are batches with base rows whose count is itself a captured one.
#
# This was seen end to end in vLLM 0.24.0 (V1 model runner, `specialize_active_lora`); [the page
# on dispatch](../dispatch.md#why-1-is-never-a-group) has the batches. All of its own parts were
# right: the tables were sorted well, the kernel skipped -1, the key counted adapters. They meant
# different things by a count.
#
# ## Mended: `-1` is never a group
#
# Then a count of adapters means the same to the scheduler, the key, the tables and the kernel.
# minilora's `KernelMeta` lists adapters only, and refuses a grid that is too small instead of
# dropping rows:

# %%
from minilora.ops import KernelMeta, lora_expand, lora_shrink

meta = KernelMeta(max_tokens=ROWS, max_loras=SLOTS)
meta.prepare(example, num_tokens_padded=ROWS, num_active_loras=2)
print("groups", meta.active_lora_ids.tolist(), "rows in each", meta.num_tokens_per_lora.tolist())
refusal = ""
try:
    meta.prepare(example, num_tokens_padded=ROWS, num_active_loras=1)
except ValueError as error:
    refusal = str(error)
print(refusal)

# %% [markdown]
# The ops of minilora loop over the grid on a CPU too (`minilora/ops/plain.py`), so that the fault
# shows here, without a GPU. Let us go around the refusal and write the naive tables by hand.


# %%
def with_ops() -> list[str]:
    out = torch.zeros(ROWS, WIDTH)
    h = lora_shrink(x, [a_stacked], meta, num_active_loras=2)
    lora_expand(h, [b_stacked], out, meta, num_active_loras=2)
    return served(out, example)


meta.prepare(example, num_tokens_padded=ROWS, num_active_loras=2)
ops_mended = with_ops()
print("-1 is no group:", ops_mended[:3])
meta.active_lora_ids.copy_(torch.tensor([-1, 0, 2, -1]))
meta.num_tokens_per_lora.copy_(torch.tensor([1, 1, 1, 0]))
meta.token_indices_sorted_by_lora_ids.copy_(torch.tensor([1, 2, 0, 3]))
ops_naive = with_ops()
print("-1 is a group: ", ops_naive[:3])

# %% [markdown]
# ## On a GPU
#
# What active adapters add to a decode step, and what more graphs cost, on one H200:

# %%
measured = json.loads(Path("docs/benchmarks/h200-graphs.json").read_text())
print(measured["machine"], "-", measured["versions"])
for name, (_, _, ratio) in measured["active"].items():
    print(f"{name:22} {ratio:.3f} times a step without LoRA")
for name in ("one set", "two sets", "by count"):
    one = measured["capture"][f"{name}, sizes to 64"]
    mib = one["graphs_mib"] + one["pool_mib"]
    print(f"{name:9}{one['graphs']:3} graphs, {mib:.0f} MiB, {one['seconds']:.1f} s to capture")

# %% [markdown]
# Each step ran in the graph of its own count here, so this does not say what a grid that is too
# large would cost.
#
# ## Check

# %%
assert too_small == ["right", "right", "WRONG", "right"], "the last group of three is dropped"
assert "WRONG" not in just_right, "a grid that is too large is right"
assert all(agree), "the rule is the dispatcher's"
assert naive[0] == "WRONG", "with -1 as a group, the last adapter is dropped"
assert "WRONG" not in mended
assert [name for name, ok in verdicts.items() if not ok] == [
    "[A, none, B]",
    "[A, none, none, none]",
]
for slots in batches.values():
    if set(slots) != {-1}:
        assert "WRONG" not in serve(slots, groups_of_adapters(slots))
assert "would drop rows" in refusal
assert ops_naive[:3] == ["WRONG", "right", "right"], "the ops show it on a CPU"
assert "WRONG" not in ops_mended
for rows in range(1, 17):
    for adapters in range(min(6, rows) + 1):
        chosen = dispatcher.dispatch(rows, adapters, uniform=True).descriptor
        assert chosen.num_tokens >= rows
        assert chosen.num_active_loras >= adapters

# %% [markdown]
# ## What you have seen
#
# A grid that is frozen needs a count that everybody means alike. Capture a few counts, round up,
# and let `-1` be no group. [Choose a graph](../choose-a-graph.md) shows the choice for steps of
# your own. Next: [one decode step, file by file](09_one_decode_step.md).
#
# Exercises: sort -1 last instead of first; is the naive table right now, and for every kernel?
# Capture 0, 1 and 4 only, and find which batches change. How many graphs would 16 slots need
# without the bound?
