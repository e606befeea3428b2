# %% [markdown]
# # 12. Measuring honestly
#
# "Our kernel takes ten microseconds." It takes two milliseconds; ten microseconds is how long
# Python needed to *ask* for it. Speed is easy to measure wrongly, and wrong numbers look as good
# as right ones. This tutorial makes five mistakes on purpose, each with a machine simple enough
# to know the truth, and mends them. The checks use simulated clocks, so that they hold on any
# machine.
#
# **You will learn**
#
# - why a timer around a launch measures the launch;
# - what the first call pays that no other does, and how a cache makes a benchmark three times too
#   fast;
# - why one number is not a result, and how pairs survive a machine that drifts.
#
# **You need** nothing of CUDA. Ten minutes to read, ten seconds to run, on a CPU.

# %%
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import matplotlib.pyplot as plt
import torch

# %% [markdown]
# ## A timer around a launch
#
# A GPU takes orders into a queue and works through them by itself. Here is one made of a thread:
# `launch` returns at once, the work is done later, `synchronize` waits for all of it. Our kernel
# takes 20 milliseconds. Predict what a timer around `launch` shows.


# %%
class Device:
    """Does the work of its launches one after another, beside the host."""

    def __init__(self) -> None:
        self.queue: Queue[float] = Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            time.sleep(self.queue.get())
            self.queue.task_done()

    def launch(self, seconds: float) -> None:
        self.queue.put(seconds)

    def synchronize(self) -> None:
        self.queue.join()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


device, kernel = Device(), 0.02
naive = timed(lambda: device.launch(kernel))
device.synchronize()


def waiting() -> None:
    device.launch(kernel)
    device.synchronize()


honest = timed(waiting)
print(f"around the launch {naive * 1e3:.3f} ms, with a wait {honest * 1e3:.1f} ms")

# %% [markdown]
# Those are real times of a busy machine, so nothing is proven with them. Here is the same device
# with a clock of our own: a launch costs the host 0.01, a kernel costs the device 20, and to wait
# is to move the host's clock on to where the device's is.


# %%
class FakeDevice:
    """The host's clock and the device's, in milliseconds."""

    def __init__(self) -> None:
        self.host = self.done = 0.0

    def launch(self, milliseconds: float) -> None:
        self.host += 0.01
        self.done = max(self.host, self.done) + milliseconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.done)


fake = FakeDevice()
fake.launch(20)
fake_naive = fake.host
fake.synchronize()
fake_honest = fake.host
print(f"around the launch {fake_naive:.2f} ms, with a wait {fake_honest:.2f} ms")

# %% [markdown]
# The default timer of a benchmark library makes this mistake on a GPU without a word. minilora's
# benchmarks wait before they read the clock (`tests/benchmarks/conftest.py`), or let the device
# take the time itself, with *events* in the queue before and after the work.
#
# ## The first call
#
# The first call of anything is special: it loads code, compiles, allocates. Put it into an
# average and the figure is about that. (In minilora everything is compiled and captured before
# the first request, and a test counts that no request compiles anything.)


# %%
class Compiled:
    """A function that is compiled when it is called for the first time."""

    def __init__(self) -> None:
        self.ready = False

    def __call__(self) -> float:  # returns seconds by a clock of our own
        first, self.ready = not self.ready, True
        return 1.0 + (50.0 if first else 0.0)


function = Compiled()
times = [function() for _ in range(10)]
cold_mean = statistics.fmean(times)
warm_mean = statistics.fmean(times[1:])
print(f"average of 10 calls {cold_mean:.1f}, after a warm-up {warm_mean:.1f}")

# %% [markdown]
# ## A cache that the real program does not have
#
# A benchmark calls one layer again and again with the same weights. After the first call they lie
# in the cache. In the real model 31 other layers run before this one comes again, and its weights
# come from far away. Here is a machine with room for four layers in its cache; a read from memory
# takes 3, from the cache 1.


# %%
class Memory:
    """Reads weights, through a cache that holds the ones used last."""

    def __init__(self, room: int) -> None:
        self.room, self.cache = room, []

    def read(self, name: int) -> float:
        seconds = 1.0 if name in self.cache else 3.0
        if name in self.cache:
            self.cache.remove(name)
        self.cache = [*self.cache, name][-self.room :]
        return seconds


def mean_read(sets: int) -> float:
    """Time per read in a loop over so many sets of weights, warmed up."""
    memory = Memory(room=4)
    reads = [memory.read(index % sets) for index in range(200)]
    return statistics.fmean(reads[100:])


by_sets = {sets: mean_read(sets) for sets in (1, 2, 4, 5, 8, 16, 32)}
fig, ax = plt.subplots(figsize=(6, 2.6))
ax.plot(list(by_sets), list(by_sets.values()), marker="o", color="tab:blue")
ax.set_xscale("log", base=2)
ax.set_xticks(list(by_sets), [str(sets) for sets in by_sets])
ax.axvline(4, color="0.5", linestyle="--")
ax.text(4.2, 1.2, "cache full")
ax.set(xlabel="sets of weights the loop goes through", ylabel="time of a read", ylim=(0, 3.5))
plt.show()

# %% [markdown]
# One set of weights measures the cache. How many sets are enough? Not a fixed number: together
# they must be larger than the cache. minilora's kernel benchmark goes through 16 sets, all inside
# one CUDA graph, as the benchmark of other engines' kernels did that it is compared with. Count
# what 16 sets hold of active adapters, for a GPU with 50 MB of cache:

# %%
CACHE, RANK, SETS = 50e6, 16, 16
LAYER = {  # Llama-3.1-8B: in, and out of each slice
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
cold = set()
print("MB of 16 sets:  1 adapter  4 adapters")
for group, (width, outs) in LAYER.items():
    one = 2 * RANK * sum(width + out for out in outs) * SETS  # bytes, bfloat16
    cold |= {(group, n) for n in (1, 4) if n * one > CACHE}
    print(f"{group:14} {one / 1e6:10.1f} {4 * one / 1e6:11.1f}")

# %% [markdown]
# Only one of the eight is larger than the cache. So our own figures for kernels are mostly of
# weights that may lie in it, and kinder than a real step, in which gigabytes of base weights pass
# between two uses. They are fair as a comparison (all kernels had the same help). For what adapters
# cost, believe a whole decode step, as `minilora bench compare` measures it.
#
# ## One number is not a result
#
# Run the same thing twice and get two numbers. How different are they, when nothing has changed?
# Without that, no difference means anything. Here on your machine, for real: one matrix product,
# 60 times. (For host code that nothing may disturb, `tests/benchmarks/test_bench_host.py` takes
# the least of 2,000 rounds instead: what a busy neighbour adds is not ours.)

# %%
torch.set_num_threads(1)
x, w = torch.randn(64, 256), torch.randn(256, 256)
for _ in range(5):
    x @ w
samples = [timed(lambda: x @ w) * 1e6 for _ in range(60)]
print("all 60 are the same number:", len(set(samples)) == 1)

# %% [markdown]
# (The numbers themselves are of your machine and not in this page.) Which one number stands for
# them? Suppose that one of sixty calls of one second is interrupted for half a minute. Predict the
# average, and the median.

# %%
rng = random.Random(0)
calm = [rng.uniform(0.99, 1.01) for _ in range(60)]
interrupted = [*calm[:-1], calm[-1] + 30]
for name, of in (("average", statistics.fmean), ("median", statistics.median)):
    print(f"{name:8} {of(calm):.3f} calm, {of(interrupted):.3f} interrupted")

# %% [markdown]
# A median, with percentiles around it, says more than an average.
#
# ## A machine that drifts
#
# Now the most expensive mistake. Is B faster than A? Measure A for a while, then B. Meanwhile the
# machine warms up, a neighbour starts a build, the clock goes down. In this simulation B is 2
# percent faster, and the machine gets slower all the time, by 10 percent over the whole
# measurement. Predict who wins.


# %%
def machine(seed: int) -> Callable[[float], float]:
    """Return a clock: true seconds in, measured seconds out, slower with every call."""
    rng, calls = random.Random(seed), [0]

    def measure(seconds: float) -> float:
        calls[0] += 1
        return seconds * (1 + 0.1 * calls[0] / 200) * rng.uniform(0.99, 1.01)

    return measure


A, B = 1.00, 0.98


def in_blocks(seed: int) -> float:
    measure = machine(seed)
    a = [measure(A) for _ in range(100)]
    b = [measure(B) for _ in range(100)]
    return statistics.median(b) / statistics.median(a)


def in_pairs(seed: int) -> float:
    measure = machine(seed)
    return statistics.median(measure(B) / measure(A) for _ in range(100))


blocks, pairs = [in_blocks(seed) for seed in range(20)], [in_pairs(seed) for seed in range(20)]
print(f"one after the other: B takes {statistics.median(blocks):.3f} of A")
print(f"in pairs:            B takes {statistics.median(pairs):.3f} of A (the truth is 0.98)")

# %%
fig, ax = plt.subplots(figsize=(6, 2))
ax.plot(blocks, [1] * 20, "o", color="tab:red", alpha=0.5)
ax.plot(pairs, [0] * 20, "o", color="tab:blue", alpha=0.5)
ax.axvline(0.98, color="0.5", linestyle="--")
ax.set_yticks([0, 1], ["in pairs", "A, then B"])
ax.set(xlabel="B over A, in 20 experiments (dashed: the truth)", ylim=(-0.5, 1.5))
plt.show()

# %% [markdown]
# Measured one after the other, B loses, with great certainty: the spread is small, and it is
# wrong. In pairs, both halves meet nearly the same machine, and little of the drift is left in the
# ratio of each pair. (`random` makes the noise here, with a seed for each experiment, so this page
# is the same everywhere.)
#
# minilora measures what it compares in turn, in one run. `measure` of `minilora/bench/latency.py`
# is the loop: every case once, then every case again; `minilora bench compare` uses it for LoRA
# off, idle and active, and divides the medians. That is a little less than a ratio for each pair,
# but the drift meets all cases alike. Here it is on your machine, with two cases that are the
# same product. How far from 1 is their ratio? So much is noise.

# %%
from minilora.bench.latency import measure, summary

same = measure({"A": lambda: x @ w, "B": lambda: x @ w}, iterations=60, warm_up=5)
medians = {name: summary(seconds)["percentiles"]["50"] for name, seconds in same.items()}
print(f"A over itself: {medians['B'] / medians['A']:.2f}, from {len(same['A'])} turns")

# %% [markdown]
# ## What a committed result looks like
#
# The benchmark pages are made from committed files, each of which says machine, versions, date,
# command and unit (tests look at both). Numbers of other programs have a file and a page of their
# own. For example:

# %%
kernels = json.loads(Path("docs/benchmarks/h200-kernels.json").read_text())
for field in ("machine", "date", "command", "unit"):
    print(f"{field}: {kernels[field]}")
for row in kernels["decode"][:3]:
    print(f"{row['rows']} rows, {row['adapters']} adapters: {row['layer']} us a layer")

# %% [markdown]
# The ratios in that file come from pairs, each measured twice in turn (one, other, one, other).
# All four times are kept, so that a reader can see the noise beside the difference:

# %%
redone = {}
for name, entry in kernels["ratios"].items():
    one, other, again, other_again = entry["us"]
    redone[name] = (one + again) / (other + other_again)
    noise = abs(one - again) / one
    print(f"{name}: {redone[name]:.3f}, the same thing twice differs by {noise:.1%}")

# %% [markdown]
# ## Check

# %%
assert fake_naive < 1 < 20 <= fake_honest, "a timer around the launch does not see the work"
assert honest >= kernel, "a wait sees all of it (a sleep is never shorter than asked for)"
assert cold_mean > 5 * warm_mean, "the first call is not like the others"
assert by_sets[1] == 1.0, "one set of weights measures the cache"
assert by_sets[32] == 3.0, "more than the cache holds measures memory"
assert cold == {("gate_up", 4)}, "sixteen sets do not leave this cache"
assert statistics.fmean(interrupted) > 1.4, "an interruption moves the average"
assert abs(statistics.median(interrupted) - 1) < 0.01, "and not the median"
assert min(blocks) > 1.0, "one after the other, the slower machine makes B lose"
assert all(0.97 < ratio < 0.99 for ratio in pairs), "pairs find the truth each time"
assert len(same["A"]) == len(same["B"]) == 60, "each turn has both"
assert {"machine", "versions", "date", "command", "unit"} <= set(kernels)
for name, entry in kernels["ratios"].items():
    assert abs(redone[name] - entry["ratio"]) < 0.002, "a ratio follows from the times beside it"

# %% [markdown]
# ## What you have seen
#
# Wait for the device, warm up, leave the cache, give a distribution, measure in pairs, and write
# down how. Next: [bring your own kernel](13_bring_your_own_kernel.md).
#
# Exercises: let the machine of the drift get faster instead. How many pairs are needed to see a
# difference of half a percent through noise of one? Give `Memory` room for 32 sets and find the
# loop that shows it.
