# %% [markdown]
# # 13. Bring your own kernel
#
# The harness that checks minilora needs nothing of minilora's: a function and its tensors are
# enough. In this tutorial you are an engineer with a kernel of your own. It passes its unit test.
# You put it into a CUDA graph, and on Thursday somebody's answers are wrong. The harness finds
# out on a laptop, before Thursday.
#
# **You will learn**
#
# - why a unit test that calls a function once cannot see a fault of graphs;
# - how to ask `check_replay` the right question: what is an input, what is state, what is scratch;
# - how to make that a test of your own project, with three fixtures of a pytest plugin.
#
# **You need** [tutorial 4](04_a_graph_recorder.md). Ten minutes to read, twelve seconds to run (two
# runs of pytest are most of it), on a CPU.

# %%
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from minilora.testing import FaultFound, check_replay

torch.manual_seed(0)

# %% [markdown]
# ## Your layer
#
# A norm. Its first pass adds the squares of each row up in a buffer, its second one scales the
# rows. To save work it handles real rows only: the caller sets their number before each step.
# Read it, and guess how many faults it has.

# %%
MY_LAYER = '''\
import torch


class RowNorm:
    """x / |x|, row by row, times a weight."""

    def __init__(self, weight, rows):
        self.weight = weight  # [H]
        self.sums = torch.zeros(rows, device=weight.device)  # [T], between the two passes
        self.num_real = rows

    def __call__(self, x):  # [T, H]
        self.sums += x.square().sum(dim=1)
        scale = torch.rsqrt(self.sums[: self.num_real] + 1e-6)
        self.sums[: self.num_real] = 0  # ready for the next call
        return x[: self.num_real] * scale[:, None] * self.weight
'''
temporary = tempfile.TemporaryDirectory()
project = Path(temporary.name)
(project / "my_layer.py").write_text(MY_LAYER)
sys.path.insert(0, str(project))
from my_layer import RowNorm


def right(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=1, keepdim=True) * weight


# %% [markdown]
# ## The naive test
#
# Make a layer, call it, compare. Call it again, since there is a buffer; compare again.

# %%
weight = torch.rand(6)
layer = RowNorm(weight, rows=4)
inputs = [torch.randn(4, 6) for _ in range(2)]
unit_test_passes = all(torch.allclose(layer(x), right(x, weight)) for x in inputs)
print("the unit test passes:", unit_test_passes)

# %% [markdown]
# ## In a graph
#
# Now as a server uses it: captured once with four rows, replayed for steps with fewer. Predict
# what is wrong in step 2.

# %%
from minilora.graphs import RecordedBackend

x = torch.zeros(4, 6)
layer = RowNorm(weight, rows=4)
graph = RecordedBackend({"x": x, "weight": weight, "sums": layer.sums}).capture(lambda: layer(x))
for step, real in enumerate([4, 2, 3]):
    x.copy_(torch.randn(4, 6))
    layer.num_real = real
    out = graph.replay()
    worst = float((out[:real] - right(x, weight)[:real]).abs().max())
    print(f"step {step}: {real} real rows, the graph returns {len(out)}, largest error {worst:.1e}")

# %% [markdown]
# No error in the real rows. The number of rows was frozen at four, so the graph always clears all
# of `sums`: it happens to be right. It is right by luck, and the next change ends the luck:
# capture it in a step with three real rows.

# %%
layer = RowNorm(weight, rows=4)
layer.num_real = 3
graph = RecordedBackend({"x": x, "weight": weight, "sums": layer.sums}).capture(lambda: layer(x))
layer.num_real = 4
x.copy_(torch.randn(4, 6))
returned = len(graph.replay())
print(f"captured with 3 rows, replayed for 4: the graph returns {returned} rows")

# %% [markdown]
# The last request of the batch gets no answer at all. Nor is the layer right without a graph. The
# unit test never had a step with fewer rows than the buffer. Three eager steps:

# %%
layer = RowNorm(weight, rows=4)
eager_errors = []
for real in (4, 2, 3):
    layer.num_real = real
    x.copy_(torch.randn(4, 6))
    eager_errors.append(float((layer(x) - right(x, weight)[:real]).abs().max()))
    print(f"{real} real rows, eager: largest error {eager_errors[-1]:.1e}")

# %% [markdown]
# The step of two rows added to all four sums and cleared two of them. The next step that has more
# rows starts from what is left.
#
# ## Asking the harness
#
# `check_replay` captures the function on the first step and compares replays with eager calls on
# every step, bit for bit; it replays twice, puts NaN into the padding rows, and poisons scratch.
# It has to be told what is what:
#
# - `inputs`: buffers that a step writes, and the function only reads;
# - `state`: fixed tensors it may read, such as weights; they are put back before each run;
# - `scratch`: what the function must write before it reads. Not put back: that is the point.

# %%
steps = [{"x": torch.randn(4, 6)} for _ in range(3)]


def faults_of(layer: RowNorm) -> str:
    state, scratch = {"weight": weight}, {"sums": layer.sums}
    try:
        count = check_replay(lambda: layer(x), {"x": x}, steps, state=state, scratch=scratch)
    except FaultFound as fault:
        return str(fault)
    return f"{count} replays, all right"


first = faults_of(RowNorm(weight, rows=4))
print(first)

# %% [markdown]
# It needed no wrong number for that: with poison in `sums`, NaN comes out, so the layer reads
# what it has not written. A buffer that one call leaves ready for the next is a promise between
# calls, and graphs, errors and other streams break promises.
#
# For the number of rows, the steps must change it as a server does. A generator may set it before
# it yields each step. (The buffer is put back before each run now, as `state`, so that it does
# not hide the second fault.)

# %%
layer = RowNorm(weight, rows=4)


def changing() -> Iterator[dict[str, torch.Tensor]]:
    for real in (4, 2, 3):
        layer.num_real = real
        yield {"x": torch.randn(4, 6)}


state = {"weight": weight, "sums": layer.sums}
try:
    check_replay(lambda: layer(x), {"x": x}, changing(), state=state)
    second = "all right"
except FaultFound as fault:
    second = str(fault)
print(second)

# %% [markdown]
# ## Mended
#
# Write the sums instead of adding to them, and compute all rows: what is in padding rows is
# thrown away, and their number is nobody's business here.

# %%
MENDED = '''\
import torch


class RowNorm:
    """x / |x|, row by row, times a weight; every row is computed, padding too."""

    def __init__(self, weight, rows):
        self.weight = weight  # [H]
        self.sums = torch.empty(rows, device=weight.device)  # [T], written before it is read

    def __call__(self, x):  # [T, H]
        torch.sum(x.square(), dim=1, out=self.sums)
        return x * torch.rsqrt(self.sums + 1e-6)[:, None] * self.weight
'''
names: dict[str, type] = {}
exec(MENDED, names)
mended = names["RowNorm"](weight, rows=4)
third = faults_of(mended)
print("mended:", third)

# %% [markdown]
# ## As a test of your own project
#
# Installing minilora registers a pytest plugin. `parity` is `check_replay` as a fixture; it runs
# a test once for each backend of the machine: recorded graphs everywhere, CUDA graphs where there
# is a GPU. `graph_backend` is the name of that backend, for tests that call the harness
# themselves. `poison` fills a tensor with NaN. Here is a whole test file, and what pytest says to
# it:

# %%
MY_TEST = """\
import pytest
import torch
from minilora.testing import check_replay
from my_layer import RowNorm


@pytest.fixture
def layer(parity):
    return RowNorm(torch.rand(6, device=parity.device), rows=4)


def test_in_a_graph(parity, layer):
    x = torch.zeros(4, 6, device=parity.device)
    steps = [{"x": torch.randn(4, 6)} for _ in range(3)]
    state = {"weight": layer.weight}
    parity(lambda: layer(x), {"x": x}, steps, state=state, scratch={"sums": layer.sums})


def test_whatever_was_there_before(poison, parity, layer):
    poison(layer.sums)
    x = torch.randn(4, 6, device=parity.device)
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("real", [1, 3])
def test_padding_stays_where_it_is(graph_backend, parity, layer, real):
    x = torch.zeros(4, 6, device=parity.device)
    steps = [{"x": torch.randn(4, 6)} for _ in range(2)]
    state = {"weight": layer.weight, "sums": layer.sums}
    count = check_replay(
        lambda: layer(x), {"x": x}, steps,
        state=state, real_rows=[real, real], backend=graph_backend,
    )
    assert count > 0
"""
(project / "test_my_layer.py").write_text(MY_TEST)


def run_pytest() -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    # Your own tests need neither of these: pytest finds the plugin. Here they save the seconds
    # that other plugins of this machine take to load.
    command += ["-p", "minilora.testing.pytest_plugin", str(project)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stdout


before, report = run_pytest()
for line in report.splitlines():
    if line.startswith("FAILED") or (line.startswith("E ") and "FaultFound:" in line):
        print(line)
print(report.splitlines()[-1].split(" in ")[0])

# %% [markdown]
# Two tests fail, each for the buffer. The third one passes: it declares `sums` as `state`, which
# is put back before each run, and asks about padding only. What you declare is what you ask.

# %%
(project / "my_layer.py").write_text(MENDED)
after, mended_report = run_pytest()
print("with the mended layer:", mended_report.splitlines()[-1].split(" in ")[0])
temporary.cleanup()

# %% [markdown]
# Kernels in Triton or CUDA go the same way: the recorder sees a custom op as one launch. Let its
# body take scratch from `minilora.ops.scratch.empty`, so that it can be filled with NaN. What
# happens *inside* a kernel, such as races, needs a real device and `compute-sanitizer`. [The
# harness](../harness.md) has all arguments, and how to check a whole engine.
#
# ## Check

# %%
assert unit_test_passes
assert eager_errors[2] > 1e-2 > max(eager_errors[:2]), "a sum was left by a smaller step"
assert returned == 3, "a number of rows that was frozen loses a request"
assert "memory that it did not write" in first
assert "a value of the capture was frozen" in second
assert "all right" in third
assert before == 1, "the plugin fails the faulty layer"
assert "FaultFound: the graph reads memory that it did not write" in report, "and says why"
assert "2 failed, 2 passed" in report, "a fault shows only to the test that asks about it"
assert after == 0, "and passes the mended one"

# %% [markdown]
# ## What you have seen
#
# Three kinds of tensors, a few steps and two replays find what a unit test cannot. If you have
# come this far, you could write minilora again. Look for the parts that you would do better;
# [contributing](../contributing.md) says how to send them.
#
# Exercises: declare `sums` as state instead of scratch; which fault is no longer seen? Give
# `check_replay` a function that reads the clock. Put your own kernel here.
