# %% [markdown]
# # 7. A second set of graphs
#
# A server with adapters loaded also gets requests without any. Their rows need no LoRA launches;
# but a graph has the launches it was captured with. vLLM had one set of graphs, captured with
# LoRA, and its users paid for adapters that nobody used. #25914 added a second set, chosen by a
# flag called `has_lora`. You will see what the first set costs, what happens if the flag is
# forgotten when a graph is *chosen*, and the launches of both sets side by side.
#
# **You will learn**
#
# - that a graph captured with LoRA runs all of it, whatever the batch needs;
# - two ways to choose wrongly: one pays, the other drops adapters in silence;
# - how to prove that the second set adds no launch, and what it does cost.
#
# **You need** [tutorial 4](04_a_graph_recorder.md). Ten minutes to read, ten seconds to run, on a
# CPU.

# %%
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import BatchDescriptor, GraphMode
from minilora.graphs import GraphKey
from minilora.testing import make_signature_adapter, make_signature_llama

# %% [markdown]
# ## A model whose answers tell
#
# `make_signature_llama` makes a Llama by hand that counts: after token 4 comes 5. Its adapters
# each insist on one token. So one look at an answer says which adapter served it, and no
# tolerance is needed.

# %%
folder = Path(tempfile.mkdtemp())
model = make_signature_llama(folder / "model")
adapters = {
    f"says-{token}": str(
        make_signature_adapter(folder / f"{token}", model, kind="down", token=token, r=2)
    )
    for token in (7, 9)
}
SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32, "num_kv_blocks": 16,
    "graph": "recorded", "graph_mode": "full", "capture_sizes": [4], "device": "cpu",
}  # fmt: skip
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def ask(llm: LLM, names: list[str | None]) -> list[list[int]]:
    loras = [LoRARequest(name, adapters[name]) if name else None for name in names]
    outputs = llm.generate([[4]] * len(names), params, loras, progress=False)
    return [output.token_ids for output in outputs]


def nodes(llm: LLM, count: int) -> list[str]:
    """The launches of the graph for four rows and that many adapters."""
    return llm.runner.nodes(GraphKey(GraphMode.FULL, BatchDescriptor(4, count, True)))


# %% [markdown]
# ## One set of graphs
#
# `specialize_lora=False` captures every graph with LoRA, as before #25914.
# `specialize_active_lora=False` leaves the number of adapters out of it, until the next tutorial.
# Predict: how many of the launches of a base-only step are LoRA's?

# %%
one_set = LLM(
    model, enable_lora=True, max_loras=2, specialize_lora=False, specialize_active_lora=False,
    **SIZES,
)  # fmt: skip
print("base only:", ask(one_set, [None, None]))
print("mixed:    ", ask(one_set, ["says-7", None, "says-9"]))
counts = {graph.descriptor.num_active_loras for graph in one_set.runner.graphs}
launched = one_set.runner.nodes(one_set.runner.dispatcher.dispatch(2, 0, uniform=True))
lora_launches = [name for name in launched if "lora_" in name]
print("graphs for adapter counts", counts)
print(len(launched), "launches in a base-only step, LoRA's own ops:", len(lora_launches))

# %% [markdown]
# The answers are right: rows without an adapter are in no group, so the LoRA kernels find nothing
# to do. They are launched all the same, a shrink and an expand for each projection of each layer
# and for `lm_head`, and an expand for the embedding.
# With 32 layers of four projections (q, k, v are one, gate and up are one) that is 256 launches
# for nothing in each step.
#
# ## Two sets
#
# With `specialize_lora` (the default) there is a second set, captured without LoRA.

# %%
two_sets = LLM(model, enable_lora=True, max_loras=2, specialize_active_lora=False, **SIZES)
with_lora, without = nodes(two_sets, 2), nodes(two_sets, 0)
rest = iter([*without, None])
other = next(rest)
print(f"{'with LoRA':26} without")
extra = []  # launches that the graph without LoRA does not have
for index, name in enumerate(with_lora):
    both = name == other
    if index < 24:
        print(f"{name:26} {other if both else ''}")
    if not both:
        extra.append(index)
    other = next(rest) if both else other
print(f"... {len(with_lora)} launches, {len(without)} without: {len(extra)} more")
in_order = other is None  # nothing of the second list is left: it is the first without some

# %% [markdown]
# The difference is larger than the number of LoRA's own ops, which we counted above: an adapter of
# an embedding looks rows up, and on a CPU that is a handful of plain ops (the first lines). As a
# picture, every launch a cell, from left to right:

# %%
fig, axes = plt.subplots(2, 1, figsize=(8, 1.8), sharex=True)
for ax, (title, names) in zip(
    axes, {"with LoRA": with_lora, "without": without}.items(), strict=True
):
    for index, name in enumerate(names):
        matmul = name in ("aten::mm", "minilora::decode_attention")
        color = "tab:blue" if matmul else "0.7"
        if names is with_lora and index in extra:
            color = "tab:orange"
        ax.bar(index, 1, width=0.9, color=color)
    ax.set_yticks([])
    ax.set_ylabel(title, rotation=0, ha="right", va="center")
axes[1].set_xlabel("launches in order (orange: LoRA's, blue: products, attention; grey: the rest)")
plt.show()

# %% [markdown]
# ## Naive: two sets, chosen by rows alone
#
# Now there are two graphs for four rows, and something has to choose. Suppose that the lookup
# forgets about adapters: it asks for four rows and takes the first it finds. Both ways to be
# wrong, one after the other: always the graph with LoRA, then always the one without. Predict
# which of them shows in the answers.

# %%
plain_dispatch = two_sets.runner.dispatcher.dispatch


def choose_always(count: int) -> Any:
    def dispatch(num_tokens: int, num_loras: int, uniform: bool) -> GraphKey:
        key = plain_dispatch(num_tokens, num_loras, uniform)
        if key.mode is GraphMode.FULL:
            key = GraphKey(key.mode, BatchDescriptor(key.descriptor.num_tokens, count, True))
        return key

    return dispatch


mixed = ["says-7", None, "says-9"]
right_answers = ask(two_sets, mixed)
two_sets.runner.dispatcher.dispatch = choose_always(2)
always_lora = ask(two_sets, [None, None, None])
print("always with LoRA, base-only batch:", always_lora, "right, and paid for")

# %% [markdown]
# The other way round needs one more naive thing. minilora's `KernelMeta` refuses a step that has
# more adapters than its grid:

# %%
from minilora.testing import StepChecker

logging.getLogger("minilora").setLevel(logging.CRITICAL)  # the engine logs a traceback
two_sets.runner.dispatcher.dispatch = choose_always(0)
print("never with LoRA:", ask(two_sets, mixed))
outputs = two_sets.generate(
    [[4]], params, LoRARequest("says-7", adapters["says-7"]), progress=False
)
refusal = str(outputs[0].outputs[0].error)
print(refusal)

# %% [markdown]
# The requests ended with an error, and nothing wrong was served. A system without that check goes
# on. To see what it would say, we let the tables hold all adapters, and still replay the graph
# without LoRA:

# %%
base_graph = GraphKey(GraphMode.FULL, BatchDescriptor(4, 0, True))
two_sets.runner.dispatcher.dispatch = plain_dispatch


def replay_base(key: GraphKey, step: Any) -> Any:
    return two_sets.runner.graphs[base_graph].replay()


plain_replay, two_sets.runner.replay = two_sets.runner.replay, replay_base
wrong_answers = ask(two_sets, mixed)
print("without the check:", wrong_answers)
print("right:            ", right_answers)
two_sets.runner.replay = plain_replay

# %% [markdown]
# Fluent, and wrong: from the first token on, both adapters are gone, and the model counts on.
# Nothing was raised. The harness compares each replay with eager execution of the same step, and
# names it:

# %%
two_sets.runner.replay = replay_base
with StepChecker(two_sets) as checker:
    ask(two_sets, mixed)
two_sets.runner.replay = plain_replay
named = [str(fault) for fault in checker.faults]
print(*named[:1])

# %% [markdown]
# ## Does a step without adapters pay nothing?
#
# The claim is strong, so the proof should be: the launches of a graph without LoRA are *exactly*
# those of an engine that was built without LoRA, in the same order.

# %%
off = LLM(model, **SIZES)
same = nodes(off, 0) == without
print("the same launches as with enable_lora=False:", same)

# %% [markdown]
# In minilora this is a test on the recorder and on an H200 (`tests/test_paths.py`). It is
# possible because the layers in `minilora/lora/layers.py` ask for the number of adapters in the
# step's descriptor, and run no LoRA op for 0. The choice is in `minilora/graphs/dispatcher.py`;
# [Choose a graph](../choose-a-graph.md) lets you play with it.
#
# ## On a GPU
#
# No launch more in a step. But a second set of graphs must be captured and kept: memory, and
# seconds at the start. Both, and a step with idle adapters over one of an engine without LoRA, on
# one H200:

# %%
measured = json.loads(Path("docs/benchmarks/h200-graphs.json").read_text())
print(measured["machine"], "-", measured["versions"])
print(f"{'Llama-2-7B, graphs':24} {'number':>6} {'MiB':>6} {'seconds':>8}")
for name, one in measured["capture"].items():
    mib = one["pool_mib"] + one["graphs_mib"]
    print(f"{name:24} {one['graphs']:6} {mib:6.0f} {one['seconds']:8.1f}")
for name, one in measured["idle"].items():
    print(f"adapters loaded and not used, {name}: {one['ratio']:.4f} times LoRA off")

# %% [markdown]
# The second set costs what the first does; the pool that all graphs share is not larger for it. So
# two sets take 1.7 times the memory of one, for sizes to 64, and not twice as much. The steps
# themselves should be equal, since their launches are. Two are within 0.3 percent and one is not:
# 0.7 percent at one row. The two engines hold weights at different addresses, which may be why;
# until both run over one set of weights, it is not explained.
#
# ## Check

# %%
assert len(extra) > len(lora_launches), "and plain ops for the embedding"
assert len(lora_launches) > 10, "one set: base-only steps run LoRA launches"
assert always_lora == [[5, 6, 7, 8]] * 3, "which is right, but paid for"
assert not any("lora_" in name for name in without), "the second set has none"
assert in_order, "and is the first one with some launches left out"
assert same, "and is exactly the engine without LoRA"
assert "adapters of the step" in refusal, "too small a grid is refused"
assert right_answers == [[7] * 4, [5, 6, 7, 8], [9] * 4]
assert wrong_answers[0] != right_answers[0], "without has_lora in the choice, adapters vanish"
assert wrong_answers[1] == right_answers[1], "and base rows hide it"
assert named, "the harness finds it"

# %% [markdown]
# ## What you have seen
#
# A graph runs what was captured. So a step without adapters needs a graph without LoRA, and the
# choice must know about it: `has_lora` is part of the key (in minilora as `num_active_loras > 0`,
# which the next tutorial needs). Next: [graphs by number of
# adapters](08_graphs_by_number_of_adapters.md).
#
# Exercises: compare the launches with one adapter and with two; what differs, and where? Let the
# choice ignore `uniform`, and find a step that shows it.
