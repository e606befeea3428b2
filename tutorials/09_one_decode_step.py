# %% [markdown]
# # 9. One decode step, file by file
#
# All parts are on the table by now: routing tables, kernels, graphs, padding, the choice of a
# graph. This tutorial puts them into a whole Llama and follows one step through it: three
# requests, one token each. At the end you compute the same step for one row by hand, in plain
# PyTorch, and get the same numbers.
#
# **You will learn**
#
# - what each part of the engine hands to the next, with every buffer of the step printed;
# - where the keys and values of a request lie, and how a table of blocks finds them;
# - that nothing else is going on: forty lines of plain PyTorch give the same logits.
#
# **You need** tutorials [2](02_one_batch_many_adapters.md), [5](05_padding_garbage.md) and
# [8](08_graphs_by_number_of_adapters.md). Fifteen minutes to read, ten seconds to run, on a CPU.

# %%
import json

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

from minilora import LLM, LoRARequest, SamplingParams
from minilora.batch import NO_LORA, Batch, BatchRow
from minilora.demo_model import demo_adapters, demo_model

torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown]
# ## The model and its requests
#
# The model comes with minilora: a Llama of four layers that reads bytes and knows a small world,
# and adapters with voices. The engine runs from recorded graphs, so all of this happens on a CPU
# as it would on a GPU. We warm up its slots so that `pirate` lies in slot 2 and `poet` in slot 0,
# as in the running example of the docs.

# %%
folder, adapters = demo_model(), demo_adapters()
llm = LLM(
    folder, enable_lora=True, max_loras=4, dtype="float32", graph="recorded", device="cpu",
    max_num_seqs=8, max_num_batched_tokens=256, capture_sizes=[1, 2, 4, 8], num_kv_blocks=32,
)  # fmt: skip
print(len(llm.runner.graphs), "graphs")
question = [{"role": "user", "content": "Where is the cat?"}]
greedy = SamplingParams(temperature=0, max_tokens=90)
for name in ("poet", "robot", "pirate"):
    warm = SamplingParams(temperature=0, max_tokens=1)
    llm.chat(question, warm, LoRARequest(name, adapters[name]), progress=False)
print({info.name: info.lora_slot for info in llm.list_adapters()})

# %% [markdown]
# ## Naive: each request alone
#
# Without any of the machinery one would merge each adapter into the weights, and run three
# models. It is slow and needs a copy of the weights for each, and nothing is simpler to trust.
# minilora keeps it as its *oracle*, in float64.

# %%
from minilora.testing import Oracle

oracle = Oracle(folder)
prompt = llm.chat_token_ids(question)
rows = ["pirate", None, "poet"]
alone = [oracle.greedy(prompt, 3, adapter=adapters[name] if name else None) for name in rows]
for name, tokens in zip(rows, alone, strict=True):
    print(f"{name or 'base':7} {llm.tokenizer.decode(tokens)!r}")

# %% [markdown]
# ## The first step: prompts
#
# `engine/llm.py` queues the requests; `engine/core.py` runs steps. A step is three calls: schedule,
# execute, commit (unless it runs ahead, with `async_scheduling`). The first step of all three
# requests computes their prompts (39 tokens each). We let it run, twice, and then look into the
# third step, by hand.

# %%
for name in rows:
    llm.add_request(prompt, greedy, LoRARequest(name, adapters[name]) if name else None)
for _ in range(2):
    llm.step()
for request in llm.scheduler.running:
    adapter = request.adapter.name if request.adapter else "base"
    print(f"{adapter:7} slot {request.lora_slot:2}, blocks {request.block_ids}, ", end="")
    print(f"{request.num_computed} tokens in the cache, wrote {request.output_token_ids}")

# %% [markdown]
# ## Schedule
#
# `engine/scheduler.py` decides who runs, and with which tokens. What it returns is host lists
# only, and nothing below has to decide anything about requests: each has its blocks and its slot.
# (`scheduler.schedule()` is what `step()` calls first.)

# %%
scheduled = llm.scheduler.schedule()
for row in scheduled.batch.rows:
    print(row)

# %% [markdown]
# ## Naive: write the three rows, forget the fourth
#
# The graph that fits has four rows. Say an earlier step filled all four; the request of the last
# row has finished since, and its block 1 now belongs to the pirate. A writer that fills the first
# three rows only, since that is all there is, leaves row 3 as it was. Predict whose logits change.
#
# minilora has no writer that can forget a row. So we write the buffers as the naive one leaves
# them, with the old row still there, and then as they should be. (The cache is put back each
# time, so that nothing else differs. The right logits of a row are the oracle's, at the end of its
# prompt and two tokens.)

# %%
runner, cache = llm.runner, llm.kv_cache.tensor
kept = cache.clone()
gone = BatchRow(token_ids=[33], start=5, block_ids=[1], lora_slot=NO_LORA, samples=True)
wanted = [
    oracle.logits([*prompt, *tokens[:2]], adapter=adapters[name] if name else None)[-1]
    for name, tokens in zip(rows, alone, strict=True)
]


def errors_with(batch: Batch) -> list[float]:
    out = runner.replay(*runner.prepare(batch))
    found = [float((out[row] - wanted[row]).abs().max()) for row in range(3)]
    cache.copy_(kept)
    return found


stale = errors_with(Batch((*scheduled.batch.rows, gone)))
whole = errors_with(scheduled.batch)
print("row 3 left from before:", [f"{error:.5f}" for error in stale])
print("row 3 written as well: ", [f"{error:.5f}" for error in whole])

# %% [markdown]
# The pirate's row is wrong, and nobody's request did that: the row that is not there stored a key
# and a value at place 5 of block 1, inside the pirate's prompt, before the others attended. The
# other two rows do not read that block. ([Tutorial 5](05_padding_garbage.md) is all about this.)
#
# ## Choose a graph, write the step
#
# `runner.py` asks `graphs/dispatcher.py` for a graph with room for three rows and two adapters,
# and `step_buffers.py` writes the *whole* padded step. Predict the four entries of each table
# before you look: what does the row of padding hold?

# %%
key, step = llm.runner.prepare(scheduled.batch)
print(key.mode.name, key.descriptor)
meta = step.meta
for name, tensor in {
    "input_ids": step.input_ids,
    "positions": step.positions,
    "slot_mapping": step.slot_mapping,
    "context_lens": step.context_lens,
    "block_tables": step.block_tables[:, :4],
    "token_lora_mapping": meta.token_lora_mapping,
    "token_indices_sorted_by_lora_ids": meta.token_indices_sorted_by_lora_ids,
    "active_lora_ids": meta.active_lora_ids,
    "num_tokens_per_lora": meta.num_tokens_per_lora,
    "lora_token_start_loc": meta.lora_token_start_loc,
}.items():
    print(f"{name:34}{tensor.tolist()}")
routing = (meta.token_lora_mapping.tolist(), meta.active_lora_ids.tolist())

# %% [markdown]
# `slot_mapping` is where the new key and value of each row go: block times 16, plus the place in
# it. The padding row writes to block 0, which nobody owns. As a picture, the pool of blocks, 16
# tokens each:

# %%
fig, ax = plt.subplots(figsize=(7, 2.2))
colours = ["tab:green", "0.6", "tab:blue"]
for row, colour in zip(scheduled.batch.rows, colours, strict=True):
    for token in range(row.start):
        block = row.block_ids[token // 16]
        ax.add_patch(plt.Rectangle((block, token % 16), 0.9, 0.9, color=colour, alpha=0.4))
for place, colour in zip(step.slot_mapping.tolist(), [*colours, "tab:red"], strict=True):
    ax.add_patch(plt.Rectangle((place // 16, place % 16), 0.9, 0.9, color=colour))
ax.set(xlim=(0, 14), ylim=(0, 16), xlabel="block", ylabel="token in the block")
ax.set_title("the cache before the step (pale) and what it writes (red: padding)")
plt.show()

# %% [markdown]
# ## Replay
#
# What was captured at the start runs again: embedding, four layers, `lm_head`, as a list of
# launches. Each projection of `lora/layers.py` is three of them: the product for all rows, then
# shrink and expand of `ops/` for rows in a group.

# %%
launches = llm.runner.graphs[key].nodes()
print(len(launches), "launches; the first layer's first:", launches[9:18])
out = llm.runner.replay(key, step)
logits = llm.runner.sampled_logits(out, step, scheduled.batch)
print("logits", list(out.shape), "of which real", list(logits.shape))

# %% [markdown]
# ## By hand
#
# Now row 0 once more, the pirate's, with what lies on disk: the weights of the model, the
# adapter's two matrices for each projection, and the keys and values of its 40 earlier tokens,
# which the step found through its block table. The new token's own we compute, and compare with
# what the replay stored in the cache.

# %%
weights = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
config = json.loads((folder / "config.json").read_text())
lora = {
    name.removeprefix("base_model.model."): t.double()
    for name, t in load_file(adapters["pirate"] / "adapter_model.safetensors").items()
}
lora_config = json.loads((adapters["pirate"] / "adapter_config.json").read_text())
scaling = lora_config["lora_alpha"] / lora_config["r"]
HEADS, KV_HEADS = config["num_attention_heads"], config["num_key_value_heads"]
D = config["hidden_size"] // HEADS


def project(x: torch.Tensor, name: str) -> torch.Tensor:
    y = x @ weights[f"{name}.weight"].T
    if f"{name}.lora_A.weight" in lora:
        y = y + scaling * (x @ lora[f"{name}.lora_A.weight"].T) @ lora[f"{name}.lora_B.weight"].T
    return y


def norm(x: torch.Tensor, name: str) -> torch.Tensor:
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
    return x * root * weights[f"{name}.weight"]


def rotate(x: torch.Tensor, position: int) -> torch.Tensor:  # [heads, D]
    angles = position / config["rope_theta"] ** (torch.arange(0, D, 2).double() / D)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# %% [markdown]
# Attention reads the cache through the block table: token 20 of a request lies in its second
# block, at place 4.


# %%
stored_errors = []


def cached(layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = step.block_tables[row].tolist()
    cache = llm.kv_cache.tensor[layer].double()  # [2, blocks, 16, Hkv, D]
    where = [(blocks[token // 16], token % 16) for token in range(int(step.context_lens[row]))]
    k, v = (torch.stack([part[block, place] for block, place in where]) for part in cache)
    return k, v  # [length, Hkv, D] each


def attend(
    q: torch.Tensor, own_k: torch.Tensor, own_v: torch.Tensor, layer: int, row: int
) -> torch.Tensor:
    k, v = cached(layer, row)
    stored_errors.append(
        max(float((k[-1] - own_k).abs().max()), float((v[-1] - own_v).abs().max()))
    )
    k, v = torch.cat([k[:-1], own_k[None]]), torch.cat([v[:-1], own_v[None]])
    out = []
    for head in range(HEADS):
        kv = head * KV_HEADS // HEADS
        scores = (k[:, kv] @ q[head]) / D**0.5
        out.append(scores.softmax(dim=0) @ v[:, kv])
    return torch.cat(out)


def by_hand(row: int) -> torch.Tensor:
    position = int(step.positions[row])
    x = weights["model.embed_tokens.weight"][int(step.input_ids[row])]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = norm(x, f"{name}.input_layernorm")
        q, k, v = (project(normed, f"{name}.self_attn.{part}_proj").view(-1, D) for part in "qkv")
        attended = attend(rotate(q, position), rotate(k, position), v, layer, row)
        x = x + project(attended, f"{name}.self_attn.o_proj")
        normed = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (project(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        x = x + project(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T  # the head is tied


hand = by_hand(0)
difference = float((hand - logits[0]).abs().max())
print("by hand:", [round(value, 5) for value in hand[:5].tolist()])
print("engine: ", [round(value, 5) for value in logits[0, :5].tolist()])
print(f"keys and values in the cache differ by {max(stored_errors):.0e} at most")
print(f"largest difference {difference:.1e} in logits from {hand.min():.1f} to {hand.max():.1f}")

# %% [markdown]
# ## Sample and commit
#
# The sampler chooses before the next replay overwrites the logits; `engine/commit.py` appends the
# tokens. Then the engine goes on by itself.

# %%
from minilora.engine.ahead import sampling_row
from minilora.engine.commit import commit_token
from minilora.engine.sampler import sample

sampled = sample(logits, [sampling_row(request) for request in scheduled.requests])
for request, token in zip(scheduled.requests, sampled, strict=True):
    commit_token(request, token, llm.max_model_len)
    request.num_computed += 1
third = [request.output_token_ids[:3] for request in scheduled.requests]

outputs = []
while llm.has_unfinished_requests():
    outputs += llm.step()
for output in sorted(outputs, key=lambda output: int(output.request_id)):
    print(f"{output.adapter or 'base':7} {output.text}")

# %% [markdown]
# ## Check

# %%
assert routing == ([2, -1, 0, -1], [0, 2, -1, -1]), "the running example"
assert key.descriptor.num_tokens == 4
assert key.descriptor.num_active_loras == 2
assert int(step.input_ids[3]) == 0
assert int(step.context_lens[3]) == 0
assert int(step.slot_mapping[3]) // 16 == 0, "padding writes to the block of nobody"
assert stale[0] > 0.01 > max(stale[1:]), "a row that was left over spoils the owner of its block"
assert max(whole) < 1e-3, "a step that is written whole spoils nobody"
assert max(stored_errors) < 1e-3, "the step stored its keys and values"
assert difference < 1e-3, "forty lines of plain PyTorch give the same logits"
assert third == alone, "and one batch gives the tokens of three models"
assert len({output.text for output in outputs}) == 3

# %% [markdown]
# ## What you have seen
#
# Two counts, of rows and of adapters, choose a graph; host lists become its fixed tensors; it is
# replayed, and three rows come back. Each file answers one question; [the
# map](../how-it-works.md) lists them. Next: [torch.compile](10_torch_compile.md).
#
# Exercises: compute row 2 by hand, with the poet's matrices. Fill block 0 with NaN before the
# replay: which logits change? Ask with five requests, and predict the graph and its padding.
