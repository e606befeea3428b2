# %% [markdown]
# # 10. torch.compile: dynamic tokens and stale shapes
#
# Between the matrix products of a Llama lie norms, rotations and activations: many small
# launches, each of which reads and writes all of its rows. `torch.compile` fuses them into few.
# It does so by *running your Python once* and keeping what it saw, which should sound familiar by
# now: what it saw can be frozen. The change that brought LoRA and compiled graphs together in
# vLLM (#14626) fought with exactly that.
#
# **You will learn**
#
# - what a compiler keeps of the first call, and what a *guard* is;
# - which sizes bring a compilation: the first one, 0, 1, and one that equals another by chance;
# - how a size, and the number of adapters, become constants, and what the wrong answers look like;
# - what minilora compiles instead, so that nothing can be frozen.
#
# **You need** [tutorial 4](04_a_graph_recorder.md). Fifteen minutes to read, six seconds to run,
# on a CPU. No C++ compiler is needed: our backend looks at the program and makes no code of it.

# %%
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch

torch.manual_seed(0)
compiled: list[torch.fx.GraphModule] = []


def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend that notes each program it is asked to compile, and runs it as it is."""
    compiled.append(graph)
    return graph.forward


def fresh(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Forget all programs, and return the function compiled anew."""
    torch._dynamo.reset()
    compiled.clear()
    return torch.compile(fn, backend=counting, fullgraph=True, **options)


def short(row: torch.Tensor) -> list[float]:
    return [round(value, 2) for value in row[:4].tolist()]


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


# %% [markdown]
# ## What is compiled
#
# The compiler traces the function with the first input it gets, and keeps the operations. Beside
# them it keeps *guards*: all that it took for granted, such as types, shapes, and Python values.
# At each call the guards are checked; if one fails, it compiles again.

# %%
fresh(norm)(torch.randn(8, 16))
print(compiled[0].code.strip())

# %% [markdown]
# ## Naive: let it happen
#
# A server has another number of rows in nearly every step. With `dynamic=False` each size is a
# program of its own. Predict the number of compilations for these sizes. (With a real backend
# all requests wait for each one, and after eight PyTorch gives up.)

# %%
ROWS = [8, 3, 5, 8, 6, 4, 1, 2, 0, 3]


def count(run: Callable[..., Any], mark: bool = False, rows: list[int] = ROWS) -> list[int]:
    """Call with several sizes; the compilations up to each call."""
    counts = []
    for size in rows:
        x = torch.randn(size, 16)
        if mark:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        run(x)
        counts.append(len(compiled))
    return counts


static = count(fresh(norm, dynamic=False))
print("rows:              ", ROWS)
print("every size its own:", static)

# %% [markdown]
# By default PyTorch learns: when a size changes for the first time, it becomes a variable. That
# is two programs, and two more, since sizes 0 and 1 are *specialised*, never a variable: an empty
# tensor has nothing to compute, and a tensor of one row can be spread over many.

# %%
learning = count(fresh(norm))
print("learning:          ", learning)

# %% [markdown]
# ## Mended: say which dimension varies
#
# We know before the first call that rows vary. Marking them makes a variable at once.

# %%
dynamic = count(fresh(norm), mark=True)
print("marked:            ", dynamic)

fig, ax = plt.subplots(figsize=(7, 2.8))
for name, counts, colour in (
    ("dynamic=False", static, "tab:red"),
    ("default", learning, "tab:orange"),
    ("marked", dynamic, "tab:blue"),
):
    ax.step(range(len(ROWS)), counts, where="post", color=colour, label=name)
ax.set_xticks(range(len(ROWS)), [str(size) for size in ROWS])
ax.set(xlabel="rows of each call, in order", ylabel="compilations so far")
ax.legend()
plt.show()

# %% [markdown]
# Three programs: any number of rows, one row, and none, which no step has. So a warm-up that runs
# two rows and then one row compiles all that serving will need.
#
# ## A size that equals another by chance
#
# Here is the subtle one. A step has at most 8192 tokens, and LoRA's tables by row are 8192 long.
# The warm-up runs the largest step, so as to measure its memory. A full step needs no slice of
# the table, and somebody wrote that down. Rows are marked. Predict: what is in the program?

# %%
MOST = 8192
table = torch.randn(MOST, 16)


def add_table(x: torch.Tensor) -> torch.Tensor:
    rows = table if x.shape[0] == len(table) else table[: x.shape[0]]
    return x + rows


by_chance = count(fresh(add_table), mark=True, rows=[MOST, 5, 6])
frozen = compiled[0]
print(frozen.code.strip())
print("with the condition:", by_chance)


def add_slice(x: torch.Tensor) -> torch.Tensor:
    return x + table[: x.shape[0]]


always_sliced = count(fresh(add_slice), mark=True, rows=[MOST, 5, 6])
print("always a slice:    ", always_sliced)

# %% [markdown]
# The condition was answered with the sizes at hand, and from then on the number of rows is the
# constant 8192, whatever the mark says: `maybe_mark_dynamic` is a wish. (`mark_dynamic` insists,
# and raises an error here; exercise 1.) The guards keep the function right, at the price of a
# compilation in the first real step. Without the condition, nothing asks, and rows stay variable.
#
# ## No guards
#
# Checking guards takes time in every step. So a server may drop them: compile at the start, keep
# the program, call it for ever. Then whatever was taken for granted must be true for ever.
#
# We try that with two programs. The first is the one above, with 8192 in it: we call it with one
# row. The second is new, and picks the last row of a prompt. Its rows are marked as static, as an
# unmarked size is on a first call anyway. Predict what each returns.


# %%
def last_row(x: torch.Tensor) -> torch.Tensor:
    return x[x.shape[0] - 1]  # of a prompt, the row that samples


def program_of(fn: Callable[..., Any], x: torch.Tensor) -> torch.fx.GraphModule:
    """Compile for one call and return the program, without its guards."""
    fresh(fn)(x)
    return compiled[0]


print("rows in: 1, rows out:", len(frozen(torch.randn(1, 16), table)[0]))

warm, longer = torch.randn(8, 16), torch.randn(12, 16)
torch._dynamo.mark_static(warm, 0)
baked = program_of(last_row, warm)
print(baked.code.strip())
print("baked:", short(baked(longer)[0]))
print("right:", short(last_row(longer)))

# %% [markdown]
# One row went in, and 8192 came out. And of twelve rows, row 7 was taken for the last, because it
# was in the warm-up. Now marked as dynamic; the program has one argument more, the size:

# %%
warm = torch.randn(8, 16)
torch._dynamo.maybe_mark_dynamic(warm, 0)
mended = program_of(last_row, warm)
print(mended.code.strip())
print("mended:", short(mended(len(longer), longer)[0]))

# %% [markdown]
# ## The number of adapters, baked in as 0
#
# The same with a number of Python. At the warm-up no adapter is loaded yet.

# %%
a, b = torch.randn(2, 16), torch.randn(16, 2)
active = {"num_loras": 0}


def layer(x: torch.Tensor) -> torch.Tensor:
    out = x * 2.0
    if active["num_loras"] > 0:
        out = out + x @ a.T @ b.T
    return out


x = torch.randn(4, 16)
without_lora = program_of(layer, x)
active["num_loras"] = 1  # later an adapter comes
stale, wanted = without_lora(x)[0], layer(x)
print("stale:", short(stale[0]))
print("right:", short(wanted[0]))
print(without_lora.code.strip())

# %% [markdown]
# The branch was decided at the warm-up, and the program has no trace of LoRA left. No error,
# fluent text, no adapter. All of this happened on the way of #14626: the 8192, the count of 0, and
# a third kind, the `max_num_batched_tokens` of one server in a program that another took from the
# compile cache.
#
# Three ways out: keep the guards; or let the number choose the program, as the key of a graph does
# ([tutorial 7](07_a_second_set_of_graphs.md)); or do not let it in.

# %%
guarded, results = fresh(layer), []
for number in (0, 1, 0, 1):
    active["num_loras"] = number
    results.append(torch.allclose(guarded(x), layer(x)))
print("with guards:", results, "programs:", len(compiled))

# %% [markdown]
# ## How minilora does it
#
# It lets nothing go in. Products, LoRA ops and attention are launches of their own in any case;
# compiling the whole model would fuse little more, and would pull its buffers, flags and counts
# into the program. So minilora compiles four *pure functions of tensors*
# (`minilora/model/fused.py`: norms, rotation, activation) and no op. Rows are marked before each
# call, and guards stay on:

# %%
import inspect

from minilora.model import fused

print(inspect.getsource(fused._compiled))

# %% [markdown]
# Here is the real class, with our backend put in place of Inductor. It begins with the size that
# was fatal above.

# %%
torch._dynamo.reset()
compiled.clear()
with patch.object(torch, "compile", partial(torch.compile, backend=counting)):
    real = fused.Fused(compiled=True)
served, same = [], []
for size in (MOST, 2, MOST - 1, MOST + 1, 5, 1, 7, 1):
    gate_up = torch.randn(size, 32)
    same.append(torch.allclose(real.silu_and_mul(gate_up), fused.silu_and_mul(gate_up)))
    served.append(len(compiled))
print("compilations:", served)

# %% [markdown]
# `tests/test_compile.py` does the same with Inductor: after the warm-up, serving compiles nothing,
# for any rows, any adapters, and a second engine with other limits; and a second process with the
# compile cache of the first is right. (Under the recorder of `graph="recorded"` a compiled
# function would silently run uncompiled, so minilora refuses the two together.)
#
# ## Check

# %%
assert static[-1] == len(set(ROWS)), "without dynamic sizes, each is a program"
assert learning[-1] == 4, "the first size, any size, one row, none"
assert dynamic[-1] == 3, "marked: any size, one row, none"
assert by_chance[-1] > by_chance[0], "a size that equals another is taken for a constant"
assert always_sliced == [1, 1, 1]
assert torch.equal(baked(longer)[0], longer[7]), "a static size is baked"
assert torch.equal(mended(len(longer), longer)[0], last_row(longer)), "a marked one is not"
assert not torch.allclose(stale, wanted), "without guards, a number of Python is frozen"
assert all(results), "with guards it is not"
assert all(same)
assert served[-1] == 2, "minilora: any number of rows, and one row"

# %% [markdown]
# ## What you have seen
#
# A compiler freezes what it saw, like a graph, and guards are its way to notice. Give it pure
# functions of tensors, mark what varies, warm up both kinds of sizes, and count. Next: [train two
# adapters](11_train_two_adapters.md).
#
# Exercises: mark the rows of `add_table` with `mark_dynamic` and read the error. Print the guards
# with `TORCH_LOGS=guards`. Let `layer` take the number of adapters as an argument: how many
# programs are there for counts 0 to 4, and why not five?
