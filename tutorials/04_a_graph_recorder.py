# %% [markdown]
# # 4. Build a graph recorder: what a CUDA graph is, and what it freezes
#
# A GPU works through a list of *launches*: run this kernel, on these addresses, with these
# numbers. Python makes that list anew for every token, and for a small step making it takes
# longer than running it. A *CUDA graph* is the list, written down once and run again as a whole.
# It is fast because no Python runs, and dangerous for the same reason. You will build one in 40
# lines, for a CPU, and see what it freezes.
#
# **You will learn**
#
# - what capture and replay are, and why a naive recorder gives old answers;
# - four things that a graph freezes: addresses, numbers, shapes, branches;
# - what must be refused, and why the refusal should name your line.
#
# **You need** some PyTorch. Nothing of CUDA: the recorder runs anywhere. Ten minutes to read, five
# seconds to run.

# %%
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

torch.manual_seed(0)
x = torch.zeros(4, 3)  # [T, in]: the fixed input, T rows
w = torch.randn(3, 3)


def step() -> torch.Tensor:
    return torch.relu(x @ w) * 2.0


# %% [markdown]
# ## Seeing the launches
#
# PyTorch turns each line of Python into calls of small operations (*ATen ops*). A dispatch mode
# sees every one of them as it passes. On a GPU each would be a launch or a few.


# %%
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func.name())
        return func(*args, **(kwargs or {}))


with Watch():
    step()

# %% [markdown]
# ## The naive recorder
#
# Keep every call with its arguments; to replay, make the calls again. The arguments hold the
# *tensors*, so their memory, so what lies there now. Predict: the input is filled with ones
# between capture and replay. Will the replay see it?


# %%
class NaiveGraph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.tape = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}))
        return out

    def replay(self):
        for func, args, kwargs in self.tape:
            out = func(*args, **kwargs)
        return out


with torch.no_grad(), NaiveGraph() as naive:
    naive_out = step()

x.fill_(1.0)
print("right:          ", step()[0].tolist())
print("replay returns: ", naive.replay()[0].tolist())
print("captured output:", naive_out[0].tolist())
naive_is_right = torch.equal(naive.replay(), step())

# %% [markdown]
# All zeros. The first call, `mm`, did see the ones in `x`: its memory is the same. But the
# replayed `mm` made a *new* tensor, and the next call on the tape still reads the old one. Only
# the first link of the chain was fresh; every later one read a tensor of the capture.
#
# On a GPU nothing is new at replay: an output lies where it lay at capture, and is overwritten.
# So must it be here.
#
# ## The recorder, mended
#
# Whatever a call made at capture gets the replayed values, in place. Two kinds of calls make
# nothing: *views* (`x[1:]`, `x.T`) share the memory of their source, and in-place calls write
# their argument. Memory tells them apart: a result in storage that we know already is not fresh.


# %%
class Graph(TorchDispatchMode):
    """Records the calls of a function, and makes them again on the same memory."""

    def __init__(self, **static):
        super().__init__()
        self.static = static
        self.tape, self.storages = [], {self.where(t) for t in static.values()}

    @staticmethod
    def where(tensor):
        return tensor.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero"):
            raise RuntimeError(f"{func.name()} takes a number from a tensor; a graph cannot")
        for tensor in tree_leaves((args, kwargs)):  # also in a list, as torch.cat takes them
            if isinstance(tensor, torch.Tensor) and self.where(tensor) not in self.storages:
                raise RuntimeError(f"{func.name()} reads a tensor {list(tensor.shape)}, undeclared")
        out = func(*args, **(kwargs or {}))
        fresh = isinstance(out, torch.Tensor) and self.where(out) not in self.storages
        if fresh:
            self.storages.add(self.where(out))
        self.tape.append((func, args, kwargs or {}, out if fresh else None))
        return out

    @torch.no_grad()
    def capture(self, fn):
        with self:
            self.out = fn()
        return self

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, fresh in self.tape:
            out = func(*args, **kwargs)
            if fresh is not None:
                fresh.copy_(out)  # at the old address
        return self.out


graph = Graph(x=x, w=w).capture(step)
for value in (1.0, -1.0, 0.5):
    x.fill_(value)
    print(f"x = {value:4}: graph {graph.replay()[0].tolist()}")
    print(f"          eager {step()[0].tolist()}")

# %% [markdown]
# That is all a CUDA graph is, seen from Python: a list of calls with frozen arguments and fixed
# addresses.
#
# ## What is frozen
#
# **Addresses.** Writing *into* `x` is seen. Putting another tensor behind the name `x` is not:
# the graph keeps the old one. (This is why minilora copies adapters into slots and never replaces
# a tensor.)

# %%
x.fill_(1.0)
kept = x
x = torch.full((4, 3), 5.0)
moved = torch.equal(graph.replay(), step())
print("after x = another tensor, the graph equals eager:", moved)
x = kept

# %% [markdown]
# **Numbers.** `2.0` in `step` is on the tape as a number. So is every Python int: a count of
# rows, a scale, a position.

# %%
scale = 2.0
scaled = Graph(x=x).capture(lambda: x * scale)
scale = 100.0
print("graph:", scaled.replay()[0].tolist(), "eager:", (x * scale)[0].tolist())
frozen_number = scaled.replay()[0, 0].item()

# %% [markdown]
# **Shapes.** A size is a number too. This graph was captured in a step of two rows. The next step
# has four.

# %%
n = 2
first_rows = Graph(x=x, w=w).capture(lambda: x[:n] @ w)
n = 4
frozen_rows = len(first_rows.replay())
print("graph:", frozen_rows, "rows, eager:", len(x[:n] @ w), "rows")

# %% [markdown]
# **Branches.** An `if` ran once, at capture, and only its calls are on the tape. So did a loop.
# Predict: the graph below is captured with two adapters. What does it do for a step with three?

# %%
num_adapters = 2
counts = torch.zeros(4)


def touch_adapters() -> torch.Tensor:
    for index in range(num_adapters):  # a loop of Python: unrolled at capture
        counts[index].add_(1.0)
    return counts


by_count = Graph(counts=counts).capture(touch_adapters)
num_adapters = 3
counts.zero_()
print("graph touched:", by_count.replay().tolist())
third_adapter_served = bool(by_count.replay()[2] > 0)

# %% [markdown]
# The third adapter is dropped without an error. Remember this one: [tutorial
# 8](08_graphs_by_number_of_adapters.md) finds it in a real system.
#
# ## What cannot be frozen
#
# `.item()` waits for the device and brings a number to Python. In a graph there is no Python to
# bring it to; the number of the capture would stay for ever. CUDA refuses that during a capture,
# often far from the line that did it. A tensor that nobody declared fixed is worse: CUDA takes
# its address and says nothing.

# %%
refused = []
stranger = torch.ones(3)
for name, fn in {
    "item": lambda: x * x.sum().item(),
    "nonzero": lambda: x.nonzero(),
    "stranger": lambda: x * stranger,
    "in a list": lambda: torch.stack([stranger, stranger]),
}.items():
    try:
        Graph(x=x).capture(fn)
    except RuntimeError as error:
        refused.append(name)
        print(f"{name}: {error}")

# %% [markdown]
# ## How minilora does it
#
# `minilora/graphs/recorded.py` is this class grown up. It says which *line* read the number, sees
# reads that make no call (`tolist`, `numpy`), fills memory that was taken and not written with
# NaN at every replay, and puts all graphs into one shared pool, so that they overwrite each
# other's outputs, as CUDA's do. The tape is in `graphs/tape.py`, the pool in `graphs/arena.py`.
# The same protocol is implemented for real CUDA graphs in `graphs/cuda.py`.

# %%
from minilora.graphs import CaptureError, RecordedBackend

backend = RecordedBackend({"x": x, "w": w})
captured = backend.capture(step)
print(captured.nodes())
try:
    backend.capture(lambda: x * x.sum().item())
except CaptureError as error:
    print(error)


def forgets_rows() -> torch.Tensor:
    out = torch.empty(4, 3)
    out[:2] = x[:2]
    return out


unwritten = RecordedBackend({"x": x}).capture(forgets_rows).replay()
print(unwritten.tolist())

# %% [markdown]
# The two rows that nobody wrote are NaN. On a GPU they would hold whatever an earlier graph left
# there, and often that looks right.
#
# ## Check

# %%
x.normal_()
assert not naive_is_right, "new outputs at replay leave the chain stale"
assert torch.equal(graph.replay(), step()), "fixed addresses follow the input"
assert torch.equal(captured.replay(), step()), "and so does minilora's recorder"
assert not moved, "a graph keeps the address of the capture"
assert frozen_number == 2.0, "a number of Python stays what it was"
assert frozen_rows == 2, "and so does a number of rows"
assert not third_adapter_served, "a loop of Python is unrolled once"
assert refused == ["item", "nonzero", "stranger", "in a list"]
assert unwritten[2:].isnan().all(), "memory that was not written shows"

# %% [markdown]
# ## What you have seen
#
# A graph is a list of launches with frozen addresses and numbers. Everything that changes from
# step to step must lie in a fixed tensor, or be part of the choice of the graph: that is [the
# invariant](../invariant.md). Next: what goes wrong when a fixed tensor is only written in part,
# [padding garbage](05_padding_garbage.md).
#
# Exercises: let `Graph` refuse a capture whose output is one of its inputs. Capture two graphs
# that share scratch memory, and see one overwrite the other's output. Find what `torch.dropout`
# does on a tape.
