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
# - why a server must not compile while it serves, and how the first size, size one, and two sizes
#   that
#   happen to be equal each bring a compilation;
# - what becomes of a Python number when the guards are dropped, and what minilora compiles instead.
#
# **You need** [tutorial 4](04_a_graph_recorder.md). Ten minutes to read, ten seconds to run, on a
# CPU. No C++ compiler is needed: we look at what is compiled, with a backend that makes no code.

# %%
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import torch

torch.manual_seed(0)
compiled: list[torch.fx.GraphModule] = []


def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend that notes each graph it is asked to compile, and runs it as it is."""
    compiled.append(graph)
    return graph.forward


def compilations(fn: Callable[..., Any], rows: list[int], **options: Any) -> list[int]:
    """Call a compiled function with inputs of several sizes; the compilations up to each call."""
    torch._dynamo.reset()
    compiled.clear()
    run = torch.compile(fn, backend=counting, fullgraph=True, **options)
    counts = []
    for size in rows:
        run(torch.randn(size, 16))
        counts.append(len(compiled))
    return counts


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


# %% [markdown]
# ## What is compiled
#
# The compiler traces the function with the first input it gets, and keeps the operations. Beside
# them it keeps *guards*: all that it took for granted, such as types, shapes, and Python values.
# At each call the guards are checked; if one fails, it compiles again.

# %%
compilations(norm, [8])
print(compiled[0].code.strip())

# %% [markdown]
# ## Naive: let it happen
#
# A server has another number of rows in nearly every step. With `dynamic=False` each size is a
# program of its own. Predict the number of compilations for these sizes. (With a real backend
# each one takes seconds, while all requests wait.)

# %%
ROWS = [8, 3, 5, 8, 7, 6, 4, 1, 2, 3]
static = compilations(norm, ROWS, dynamic=False)
print("every size its own:", static)

# %% [markdown]
# By default PyTorch learns: when a size changes for the first time, it becomes a variable. That
# is better, and still two programs, and a third for one row: size 1 is special to PyTorch (a
# tensor of one row can be spread over many).

# %%
learning = compilations(norm, ROWS)
print("learning:          ", learning)

# %% [markdown]
# ## Mended: say which dimension varies
#
# We know before the first call that the number of rows varies. Marking it makes it a variable at
# once.


# %%
def marked(rows: list[int]) -> list[int]:
    torch._dynamo.reset()
    compiled.clear()
    run = torch.compile(norm, backend=counting, fullgraph=True)
    counts = []
    for size in rows:
        x = torch.randn(size, 16)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        run(x)
        counts.append(len(compiled))
    return counts


dynamic = marked(ROWS)
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
# Two programs: one for any number of rows, one for a single row. So a warm-up that runs two rows
# and then one row compiles all that serving will need.
#
# ## Two sizes that happen to be equal
#
# Here is the subtle one. A compiler with variable sizes gives equal sizes the same variable, when
# they are equal in the first call. vLLM's warm-up ran with the most tokens a step can have, 8192,
# and buffers were 8192 long. Predict: we trace with as many rows as the table is long. What is
# compiled when the next step has fewer rows?


# %%
def add_positions(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x + table[: x.shape[0]]


def traced_with(first: int, length: int) -> int:
    """Compilations for the sizes `first`, 5 and 6, with a table of some length."""
    torch._dynamo.reset()
    compiled.clear()
    run = torch.compile(add_positions, backend=counting, fullgraph=True, dynamic=True)
    for size in (first, 5, 6):
        run(torch.randn(size, 16), torch.randn(length, 16))
    return len(compiled)


equal, different = traced_with(first=32, length=32), traced_with(first=31, length=32)
print("first call as long as the table:", equal, "programs; shorter:", different)

# %% [markdown]
# The guard says "rows equal the table's length", and the next step breaks it. With guards that is
# one compilation more, at the worst moment: the first real step. Without guards it is worse, and
# that is the next section.
#
# ## No guards
#
# Checking guards takes time in every step, so servers drop them: compile once, keep the program,
# call it for ever. That is what vLLM does, with good reason; then whatever was taken for granted
# must be true for ever. Let us do the same.


# %%
def compile_once(fn: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """Trace a function once and return the program, without its guards."""
    torch._dynamo.reset()
    compiled.clear()
    torch.compile(fn, backend=counting, fullgraph=True)(*example)
    return compiled[0].forward


a, b = torch.randn(2, 16), torch.randn(16, 2)
active = {"num_loras": 0}


def layer(x: torch.Tensor) -> torch.Tensor:
    out = x * 2.0
    if active["num_loras"] > 0:
        out = out + x @ a.T @ b.T
    return out


x = torch.randn(4, 16)
warm = compile_once(layer, x)  # warm-up: no adapter is loaded yet
active["num_loras"] = 1  # later one is, and used
stale = torch.equal(warm(x)[0], layer(x))
print("the program without guards has the adapter:", stale)
print(compiled[0].code.strip())

# %% [markdown]
# The branch was decided at the warm-up, and the program has no trace of LoRA left. No error,
# fluent text, no adapter. Before #14626 settled it, the number of active adapters was baked in as 0
# in this way, and `max_num_batched_tokens` of one server was found in another's cached program.
#
# With its guards, the same function is right. It compiles again when the number changes:

# %%
torch._dynamo.reset()
compiled.clear()
guarded = torch.compile(layer, backend=counting, fullgraph=True)
results = []
for count in (0, 1, 0, 1):
    active["num_loras"] = count
    results.append(torch.allclose(guarded(x), layer(x)))
print("right:", results, "programs:", len(compiled))

# %% [markdown]
# ## How minilora does it
#
# Products, LoRA ops and attention are launches of their own in any case; compiling the whole
# model would fuse nothing more, and would pull its buffers, flags and counts into the program. So
# minilora compiles four *pure functions of tensors* (`minilora/model/fused.py`): nothing else can
# be taken for granted, since nothing else goes in. The rows are marked before each call, and
# guards stay on. Here is all of it:

# %%
import inspect

from minilora.model import fused

print(inspect.getsource(fused.silu_and_mul))
print(inspect.getsource(fused._compiled))

# %% [markdown]
# One trap is left even there. Where a slice *begins* in its memory is a size to the compiler too,
# and was once taken to equal another that happened to be the same number. `fused.rotate`
# therefore cuts q and k out of their common tensor itself. `tests/test_compile.py` counts
# compilations: after the warm-up, serving makes none, for any rows, any adapters, and a second
# engine with other limits in the same process.
#
# The recorder of `graph="recorded"` watches every operation, and a compiled function hides them;
# so the two are not combined. On a GPU the compiled functions run inside the CUDA graphs.
#
# ## Check

# %%
torch._dynamo.reset()
compiled.clear()
run = torch.compile(fused.silu_and_mul, backend=counting, fullgraph=True)
for size in (2, 1, *ROWS):
    gate_up = torch.randn(size, 32)
    torch._dynamo.maybe_mark_dynamic(gate_up, 0)
    assert torch.allclose(run(gate_up), fused.silu_and_mul(gate_up))
assert len(compiled) == 2, "any number of rows, and one row"
assert static[-1] == len(set(ROWS)), "without dynamic sizes, each is a program"
assert learning[-1] == 3, "the first size, any size, and one row"
assert dynamic[-1] == 2, "marked: any size, and one row"
assert equal > different, "sizes that are equal by chance are taken for the same"
assert not stale, "without guards, a number of Python is frozen"
assert all(results), "with guards it is not"

# %% [markdown]
# ## What you have seen
#
# A compiler freezes what it saw, like a graph, and guards are its way to notice. Give it pure
# functions of tensors, mark what varies, warm up both kinds of sizes, and count. Next: [train two
# adapters](11_train_two_adapters.md).
#
# Exercises: mark the wrong dimension and read the error. Print the guards with
# `TORCH_LOGS=guards`. Let `layer` take the number of adapters as an argument: how many programs
# are there now for counts 0 to 4?
