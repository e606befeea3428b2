# %% [markdown]
# # 6. Buffers that must be reset, and where the zeroing belongs
#
# A LoRA update goes through a narrow middle: `h = x Aᵀ`, then `out += h Bᵀ`. A kernel that cuts
# the long sum of the first half into parts adds them up in a buffer, and a sum needs a zero to
# start from. Who writes that zero, and when? There are three places for it. Two are wrong, one of
# them so subtly that vLLM needed #25914 to move it.
#
# **You will learn**
#
# - why a buffer that is cleared outside a graph is right the first time and wrong ever after;
# - what clearing beside the op costs those who use no LoRA;
# - how to have no buffer to clear at all, and how a recorder shows a reset that was forgotten.
#
# **You need** [tutorial 4](04_a_graph_recorder.md) (graphs) and the idea of shrink and expand
# ([tutorial 2](02_one_batch_many_adapters.md)). Ten minutes to read, five seconds to run, on a CPU.

# %%
import matplotlib.pyplot as plt
import torch

from minilora.graphs import RecordedBackend

torch.manual_seed(0)
ROWS, WIDTH, RANK, PARTS = 4, 12, 2, 3
COLUMNS = [slice(start, start + WIDTH // PARTS) for start in range(0, WIDTH, WIDTH // PARTS)]
x = torch.randn(ROWS, WIDTH)  # [T, in]
weight = torch.randn(WIDTH, WIDTH)  # the model's own
a, b = torch.randn(RANK, WIDTH), torch.randn(WIDTH, RANK)
h = torch.zeros(ROWS, RANK)  # [T, r], the buffer
static = {"x": x, "weight": weight, "a": a, "b": b, "h": h}


def right() -> torch.Tensor:
    return x @ weight.T + x @ a.T @ b.T


def error(out: torch.Tensor) -> float:
    return float((out - right()).abs().max())


# %% [markdown]
# ## A shrink that adds up
#
# The sum over `in` is cut into three parts, as *split-K* kernels do, so that more of the GPU has
# work. Each part adds its share to `h`.


# %%
def shrink_adding() -> None:
    for part in COLUMNS:
        h.add_(x[:, part] @ a[:, part].T)


def expand(out: torch.Tensor) -> torch.Tensor:
    return out.add_(h @ b.T)


# %% [markdown]
# ## First place: outside the graph
#
# The obvious code: clear the buffer, then run. Somebody captures the part that runs. Predict the
# errors of three replays in a row, on the same input.


# %%
def without_reset() -> torch.Tensor:
    out = x @ weight.T
    shrink_adding()
    return expand(out)


h.zero_()
outside = RecordedBackend(static).capture(without_reset)
h.zero_()
outside_errors = [round(error(outside.replay()), 2) for _ in range(3)]
print("cleared before the first replay:", outside_errors)

# %% [markdown]
# The first is right, and that is the one a test looks at. The buffer keeps the sum of each
# replay, so the update of the second is counted twice, of the third three times. It could be
# cleared before each replay, as a launch of its own outside the graph. But then two places must
# agree for ever: whoever replays has to know what is inside.
#
# The harness replays twice on the same input, and knows at once.

# %%
from minilora.testing import FaultFound, check_replay

steps = [{"x": torch.randn(ROWS, WIDTH)} for _ in range(2)]
state = {"weight": weight, "a": a, "b": b}
named = ""
h.zero_()
try:
    check_replay(without_reset, {"x": x}, steps, state=state, scratch={"h": h})
except FaultFound as fault:
    named = str(fault)
print(named)

# %% [markdown]
# ## Second place: in the graph, beside the op
#
# So the zeroing goes into the graph: into the function that prepares a step, say, since several
# layers share the buffer. It is right now. Predict what it costs a batch in which nobody uses an
# adapter.


# %%
def reset_beside(has_lora: bool) -> torch.Tensor:
    h.zero_()  # "prepare": every step does it
    out = x @ weight.T
    if has_lora:
        shrink_adding()
        expand(out)
    return out


beside = {
    lora: RecordedBackend(static).capture(lambda lora=lora: reset_beside(lora))
    for lora in (True, False)
}
beside_errors = [round(error(beside[True].replay()), 4) for _ in range(3)]
print("errors:", beside_errors)
print("launches with LoRA:   ", beside[True].nodes())
print("launches without LoRA:", beside[False].nodes())

# %% [markdown]
# The graph without LoRA clears a buffer that nobody reads: a launch for each layer and slice, in
# the steps that were to cost nothing. In vLLM, having LoRA enabled made a batch without adapters
# 10 percent slower than LoRA switched off; vLLM #25914 gave such batches graphs of their own and
# moved the reset to where it is needed.
#
# ## Third place: inside the op
#
# If the zeroing belongs to the op, then a graph has it exactly when it has the op, and nobody
# else knows of it.


# %%
def shrink_resetting() -> None:
    h.zero_()
    shrink_adding()


def reset_inside(has_lora: bool) -> torch.Tensor:
    out = x @ weight.T
    if has_lora:
        shrink_resetting()
        expand(out)
    return out


inside = {
    lora: RecordedBackend(static).capture(lambda lora=lora: reset_inside(lora))
    for lora in (True, False)
}
inside_errors = [round(error(inside[True].replay()), 4) for _ in range(3)]
print("errors:", inside_errors)
print("launches without LoRA:", inside[False].nodes())

# %%
graphs = {"beside the op": beside, "inside the op": inside}
fig, ax = plt.subplots(figsize=(7, 2.2))
for place, pair in enumerate(graphs.values()):
    for offset, lora, colour in ((-0.2, True, "tab:blue"), (0.2, False, "tab:orange")):
        count = len(pair[lora].nodes())
        label = ("with LoRA" if lora else "without LoRA") if place == 0 else None
        ax.barh(place + offset, count, height=0.35, color=colour, label=label)
        ax.text(count + 0.1, place + offset, str(count), va="center")
ax.set_yticks(range(2), [f"reset {name}" for name in graphs])
ax.set(xlabel="launches in the graph")
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## Better: nothing to reset
#
# A launch that writes zeros, and another that reads them, is work for nothing. A shrink that
# *writes* each part to a place of its own needs no zero: `h` is `[parts, T, r]`, and expand adds
# the parts up in a fixed order. Every element that expand reads has been written in the same
# step, whatever was there before. (And without atomic adds the order of the sum is always the
# same, so every run gives the same bits.)

# %%
h_parts = torch.empty(PARTS, ROWS, RANK)


def shrink_writing() -> None:
    for index, part in enumerate(COLUMNS):
        torch.mm(x[:, part], a[:, part].T, out=h_parts[index])


def no_reset() -> torch.Tensor:
    out = x @ weight.T
    shrink_writing()
    return out.add_(h_parts.sum(dim=0) @ b.T)


static_parts = {**static, "h_parts": h_parts}
writing = RecordedBackend(static_parts).capture(no_reset)
h_parts.fill_(torch.nan)  # whatever was there before
writing_errors = [round(error(writing.replay()), 4) for _ in range(3)]
print("errors:", writing_errors, "launches:", len(writing.nodes()))
checked = check_replay(no_reset, {"x": x}, steps, state=state, scratch={"h_parts": h_parts})
print(f"the harness: {checked} replays, all right")

# %% [markdown]
# That is minilora's contract: `lora_shrink` writes *every* element that `lora_expand` will read
# (`minilora/ops/shrink.py`). There is no buffer to clear, and no place to forget it.
#
# ## What if it is forgotten all the same?
#
# A buffer that a graph takes for itself, with `torch.empty`, holds whatever was there. On a GPU
# that is often zero at first, because fresh memory is, and something else in the second week. The
# recorder fills such memory with NaN at each replay. Predict what the next cell prints.


# %%
def forgetful() -> torch.Tensor:
    out = x @ weight.T
    own = torch.empty(ROWS, RANK)
    own.add_(x @ a.T)  # adds to what nobody wrote
    return out.add_(own @ b.T)


lost = RecordedBackend(static).capture(forgetful).replay()
print(lost[0, :4].tolist())

# %% [markdown]
# ## The same with tables
#
# Not only sums must be reset. A table that lists the adapters of a step has room for several. A
# step with one adapter that leaves the second entry of the step before has two, as far as the
# kernel can see. minilora's `KernelMeta.prepare` writes every element of every table:

# %%
from minilora.ops import KernelMeta

meta = KernelMeta(max_tokens=4, max_loras=4)
meta.prepare([2, -1, 0], num_tokens_padded=4, num_active_loras=2)
before = meta.active_lora_ids.tolist()
meta.prepare([-1, 3], num_tokens_padded=4, num_active_loras=2)
after = meta.active_lora_ids.tolist()
print("step with slots 2 and 0:", before)
print("step with slot 3:       ", after, meta.num_tokens_per_lora.tolist())

# %% [markdown]
# ## Check

# %%
assert outside_errors[0] < 0.01 < outside_errors[1] < outside_errors[2], "it piles up"
assert "not reset" in named, "the harness names the fault"
assert max(beside_errors) < 0.01
assert max(inside_errors) < 0.01
plain = RecordedBackend(static).capture(lambda: x @ weight.T).nodes()
assert beside[False].nodes() != plain, "a reset beside the op is paid without LoRA"
assert inside[False].nodes() == plain, "a reset inside the op is not"
assert max(writing_errors) < 0.01, "what is written need not be cleared, even of NaN"
assert checked > 0
assert lost.isnan().all(), "a reset that was forgotten shows"
assert after == [3, -1, -1, -1], "nothing of the last step is left"

# %% [markdown]
# ## What you have seen
#
# A reset belongs into the op that needs it: outside it is forgotten, beside it everybody pays.
# Best is an op that writes all it reads. Next: why steps without adapters deserve [a second set
# of graphs](07_a_second_set_of_graphs.md).
#
# Exercises: clear `h` at the *end* of `expand`; find the first replay that is wrong. Let only two
# of three parts write `h_parts`, and see what `check_replay` calls it.
