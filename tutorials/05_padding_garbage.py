# %% [markdown]
# # 5. Padding garbage
#
# Graphs are captured for a few sizes. A step of three requests runs in the graph for four, and
# the fourth row is *padding*: it is computed like the others, and its result is thrown away. So
# it does not matter what is in it? It does. This tutorial shows two ways in which padding does
# harm, both met in production: rows that keep what an earlier step left, and an embedding layer
# that changes its own input, so that garbage piles up from replay to replay (vLLM #14626).
#
# **You will learn**
#
# - why "write the first n rows" of a buffer is not enough;
# - how an in-place update of a graph's input grows without bound, in padding rows only;
# - the rule that makes both impossible, and how to find both without knowing them.
#
# **You need** [tutorial 4](04_a_graph_recorder.md): a graph reads fixed memory. Ten minutes to
# read, five seconds to run, on a CPU.

# %%
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch

from minilora.graphs import RecordedBackend

torch.manual_seed(0)
ROWS, VOCAB, WIDTH = 4, 16, 8
table = torch.randn(VOCAB, WIDTH)  # the embedding: a row for each token
kv = torch.zeros(6, WIDTH)  # a cache with six places; place 0 belongs to nobody

# %% [markdown]
# ## A step in a graph
#
# A step reads the token ids of its rows, looks up their embeddings and stores each in the cache,
# at the place that `slot_mapping` says. (A real step stores keys and values; for what follows
# that is the same.) Ids and places are fixed tensors, as a graph needs them.

# %%
input_ids = torch.zeros(ROWS, dtype=torch.int64)
slot_mapping = torch.zeros(ROWS, dtype=torch.int64)
static = {"ids": input_ids, "slots": slot_mapping, "table": table, "kv": kv}


def step() -> torch.Tensor:
    hidden = table.index_select(0, input_ids)  # [T, H]
    kv.index_copy_(0, slot_mapping, hidden)
    return hidden


graph = RecordedBackend(static).capture(step)

# %% [markdown]
# ## Naive: write the rows that are real
#
# Step 1 has four requests, in places 1 to 4. Then the fourth ends, and somebody else gets its
# place 4: the next prompt stores its own embedding there. Step 2 has three requests and writes
# three rows. Predict: what is in place 4 after step 2?


# %%
def write_real(ids: list[int], slots: list[int]) -> None:
    input_ids[: len(ids)] = torch.tensor(ids)
    slot_mapping[: len(slots)] = torch.tensor(slots)


kv.zero_()
write_real([7, 8, 9, 10], [1, 2, 3, 4])
graph.replay()
kv[4] = table[3]  # the new owner of place 4 stores token 3
write_real([11, 12, 13], [1, 2, 3])
graph.replay()


def token_in(place: int) -> int:
    return int((table - kv[place]).abs().sum(dim=1).argmin())


naive_token = token_in(4)
print("place 4 should hold token 3; it holds token", naive_token)

# %% [markdown]
# The padding row still had the id and the place of the request that ended. It wrote to memory
# that belongs to somebody else by now, whose answer changes. Nothing crashed; without graphs it
# never happens, and with graphs only when a batch shrinks. ([Hazards](../hazards.md) lists public
# reports.)
#
# ## Mended: the whole padded step, always
#
# The host builds *every* row and uploads all of it. A padding row has id 0 and place 0, which
# belongs to nobody.


# %%
def write_all(ids: list[int], slots: list[int]) -> None:
    padding = [0] * (ROWS - len(ids))
    input_ids.copy_(torch.tensor(ids + padding))
    slot_mapping.copy_(torch.tensor(slots + padding))


kv.zero_()
write_all([7, 8, 9, 10], [1, 2, 3, 4])
graph.replay()
kv[4] = table[3]
write_all([11, 12, 13], [1, 2, 3])
graph.replay()
mended_token = token_in(4)
print("place 4 holds token", mended_token)

# %% [markdown]
# ## An embedding that writes its own input
#
# Now the second kind. Adapters may add a few tokens of their own, whose ids begin where the
# model's end: here 16 and 17. Each adapter has its own two, so one long table holds the 16 rows of
# the model and then two rows for each of three adapters, and the extra ids are *shifted* to the
# adapter's place: by 0 for the first, by 2 for the second, by 4 for the third. One way to do it:
# add the shift to the ids, *in place*, and look all of them up. Eager execution is right, because
# the ids are written anew for each step. In a graph the ids are its input buffer.
#
# Suppose ids and shifts are written for the real rows only, and two of four rows are real. Row 1
# asks for an extra token of the second adapter, and row 3, padding now, did so in an earlier step.
# Predict: what does the id of row 3 look like over ten replays?

# %%
shift = torch.tensor([0, 2, 0, 2])  # rows 2 and 3 are of an earlier, larger step
long_table = torch.randn(VOCAB + 3 * 2, WIDTH)
earlier = [5, 16, 7, 17]
ids = torch.tensor(earlier)


def embed_in_place() -> torch.Tensor:
    ids.add_(torch.where(ids >= VOCAB, shift, 0))  # the graph writes to its own input
    return long_table.index_select(0, ids)


shifting = RecordedBackend({"ids": ids, "shift": shift, "table": long_table}).capture(
    embed_in_place
)
ids.copy_(torch.tensor(earlier))
history, stopped = [], ""
for _ in range(10):
    ids[:2] = torch.tensor(earlier[:2])  # the real rows are written in each step
    try:
        shifting.replay()
    except IndexError as error:
        stopped = str(error)
    history.append(ids.tolist())
    print(f"ids after replay {len(history)}: {history[-1]}")
    if stopped:
        print(stopped)
        break

# %% [markdown]
# Row 1 is right each time: it is 16 again before every replay, and becomes 18. Row 3 is padding,
# nobody writes it, and each replay adds to what the last one left, until it leaves the table. A
# CPU says so. On a GPU that is a read of foreign memory, or an illegal access that stops the
# server hours after the fault was made: the more rows the table has, the later.

# %%
fig, ax = plt.subplots()
for row, colour in enumerate(("tab:blue", "tab:green", "0.5", "tab:red")):
    values = [after[row] for after in history]
    name = f"row {row}" + ("" if row < 2 else ", padding")
    ax.plot(range(1, len(history) + 1), values, color=colour, marker="o", label=name)
ax.axhline(len(long_table) - 0.5, color="0.5", linestyle="--")
ax.text(1, len(long_table) - 1.7, "the table ends here")
ax.set_xticks(range(1, len(history) + 1))
ax.set(xlabel="replay", ylabel="id in the buffer", title="A graph that writes its own input")
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# One could clear the padding rows in each step, and `write_all` does. But the input would still
# be changed under the feet of everybody who reads it later in the same step. The rule is
# stronger: **a graph only reads its inputs.** The shift goes into a new tensor.


# %%
def embed() -> torch.Tensor:
    return long_table.index_select(0, ids + torch.where(ids >= VOCAB, shift, 0))


ids.copy_(torch.tensor(earlier))
pure = RecordedBackend({"ids": ids, "shift": shift, "table": long_table}).capture(embed)
for _ in range(10):
    pure.replay()
after_ten = ids.tolist()
print("ids after ten replays:", after_ten)

# %% [markdown]
# ## Finding it without knowing it
#
# A unit test that writes and calls once is green for both faults. The first is found by garbage:
# fill the buffers with one thing or another before the step is written. If that changes memory that
# somebody owns, not all was written. (`poisoned` of `minilora.testing` does it to a whole engine.)


# %%
def survives_garbage(write: Callable[[list[int], list[int]], None]) -> bool:
    owned = []
    for garbage in (0, 5):
        input_ids.fill_(garbage)
        slot_mapping.fill_(garbage)
        kv.zero_()
        write([11, 12, 13], [1, 2, 3])
        graph.replay()
        owned.append(kv[1:].clone())
    return torch.equal(*owned)


garbage_shows = not survives_garbage(write_real)
print("write_real leaves something:", garbage_shows)
print("write_all leaves something: ", not survives_garbage(write_all))

# %% [markdown]
# The second is found by looking at the inputs. minilora's
# [`check_replay`](../reference/testing.md) replays a function over several steps and compares its
# inputs after each run, among other things. It was not told what to look for.

# %%
from minilora.testing import FaultFound, check_replay

found = ""
try:
    check_replay(
        embed_in_place,
        {"ids": ids},
        [{"ids": torch.tensor(earlier)}, {"ids": torch.tensor([1, 16, 17, 4])}],
        state={"shift": shift, "table": long_table},
    )
except FaultFound as error:
    found = str(error)
print(found)

checked = check_replay(
    embed,
    {"ids": ids},
    [{"ids": torch.tensor(earlier)}, {"ids": torch.tensor([1, 16, 17, 4])}],
    state={"shift": shift, "table": long_table},
)
print(f"the pure one: {checked} replays, all right")

# %% [markdown]
# ## How minilora does it
#
# `minilora/step_buffers.py` builds the complete padded step in NumPy and uploads it in one copy:
# there is no function that writes "the first n rows". Padding rows write to KV block 0, which no
# request owns. Here is the running example, three rows padded to four.

# %%
from minilora.batch import Batch, BatchDescriptor, BatchRow, GraphMode
from minilora.step_buffers import StepBuffers

buffers = StepBuffers(
    max_num_tokens=8, max_num_seqs=4, max_blocks=2, block_size=4, max_loras=4, device="cpu"
)
rows = [BatchRow([11], 3, [1], 2, True), BatchRow([12], 5, [2, 3], -1, True)]
rows.append(BatchRow([13], 0, [4], 0, True))
padded = BatchDescriptor(num_tokens=4, num_active_loras=2, uniform=True)
written = buffers.write(Batch(tuple(rows)), padded, GraphMode.FULL)
print("input_ids          ", written.input_ids.tolist())
print("slot_mapping       ", written.slot_mapping.tolist())
print("context_lens       ", written.context_lens.tolist())
print("token_lora_mapping ", written.meta.token_lora_mapping.tolist())

# %% [markdown]
# The last row of every buffer is written: id 0, place 0, length 0, no adapter. And the embedding
# only reads: `lora_embedding_shrink` in `minilora/ops/embedding.py` looks ids up and leaves them
# alone. `minilora verify` fills everything that must not matter with garbage between steps, on each
# path of your machine.
#
# ## Check

# %%
assert naive_token != 3, "a padding row wrote to a place of somebody else"
assert mended_token == 3, "a padding row that is written writes to nobody's place"
row_3 = [after[3] for after in history]
assert row_3 == sorted(set(row_3)), "the id of the padding row grows with every replay"
assert max(row_3) >= len(long_table), "and leaves the table"
assert "out of range" in stopped
assert after_ten == earlier, "the pure embedding does not change its input"
assert garbage_shows, "garbage finds the rows that are not written"
assert survives_garbage(write_all), "and none where all are"
assert "in place" in found, "the harness names the fault"
assert checked > 0
assert written.input_ids[3] == 0
assert written.slot_mapping[3] == 0
assert written.meta.token_lora_mapping[3] == -1

# %% [markdown]
# ## What you have seen
#
# Padding rows are computed, so what is in them matters: they write to memory, and they read it.
# Write every row of every buffer in every step, and never write an input inside a graph. Next:
# memory *inside* the graph that must be cleared, [buffers that must be
# reset](06_buffers_that_must_be_reset.md).
#
# Exercises: let `write_real` clear the rest of `slot_mapping` only; which fault is left? Make
# `embed_in_place` shift the ids back at its end; is it right now, for every reader?
