# %% [markdown]
# # 1. LoRA in ten lines, and why merging does not serve two users
#
# An *adapter* teaches a model something new without changing the model: a thin matrix product is
# added to a large one. We train two adapters for a single layer, in a second, and then serve three
# users at once: one with adapter A, one with none, one with adapter B. The usual way, merging the
# adapter into the weights, gives two of the three a wrong answer.
#
# **You will learn**
#
# - what $W + s\,B A$ means, and why it is so small;
# - three things that go wrong when merged weights serve several users: wrong answers, traffic or
#   memory, and weights that do not come back;
# - the sum that serves all of them in one batch, on which the rest of the project is built.
#
# **You need** Python and some PyTorch (tensors, gradients). To run this and the other tutorials:
# `pip install -e '.[docs]'`, in the root of the repository. Ten minutes to read, five seconds to
# run, on a CPU.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

torch.manual_seed(0)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZE = len(LETTERS)

# %% [markdown]
# ## A model of one layer
#
# The model is one linear layer, $y = x\,W^\top$. Its input $x$ is a letter, as a row with a single
# one in it. Its output has a number for each letter (the *logits*); the largest is the answer.
# Our $W$ says the alphabet: after `h` comes `i`. A little noise stands for all the other things
# that a real weight holds.

# %%
W = 4.0 * torch.eye(SIZE).roll(1, dims=0) + 0.3 * torch.randn(SIZE, SIZE)  # [out, in]


def rows_of(text: str) -> torch.Tensor:
    return torch.eye(SIZE)[[LETTERS.index(letter) for letter in text]]  # [T, in]


def answers(logits: torch.Tensor) -> str:
    return "".join(LETTERS[i] for i in logits.argmax(dim=1).tolist())


x_all = rows_of(LETTERS)
print("asked:   ", LETTERS)
print("answered:", answers(x_all @ W.T))

# %% [markdown]
# ## LoRA in ten lines
#
# We want another answer without touching $W$. LoRA (low-rank adaptation) adds a second, thin
# path beside it:
#
# $$y = x\,W^\top + s\,(x\,A^\top)\,B^\top$$
#
# $A$ is `[r, in]` and $B$ is `[out, r]`. The *rank* $r$ is small. The *scaling* is
# $s = \alpha / r$, so that one may change the rank without looking for a new learning rate. $A$
# begins with noise and $B$ with zeros: at the start the adapter changes nothing. Here is all of
# it, training included. The frozen $W$ takes no gradient.

# %%
r, alpha = 2, 4.0
s = alpha / r


def train(wanted: str) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(r, SIZE).mul_(0.3).requires_grad_()  # [r, in]
    b = torch.zeros(SIZE, r, requires_grad=True)  # [out, r]
    target = torch.tensor([LETTERS.index(letter) for letter in wanted])
    for _ in range(400):
        logits = x_all @ W.T + s * (x_all @ a.T) @ b.T
        torch.nn.functional.cross_entropy(logits, target).backward()
        for weight in (a, b):
            weight.data -= 0.5 * weight.grad
            weight.grad = None
    return a.detach(), b.detach()


# %% [markdown]
# Adapter A always answers `x`. Adapter B answers `k` after a vowel and leaves the alphabet as it
# is otherwise. Predict: what will B say after `h`, and after `e`?

# %%
after = dict(zip(LETTERS, answers(x_all @ W.T), strict=True)) | dict.fromkeys("aeiou", "k")
wanted = {"A": "x" * SIZE, "B": "".join(after.values())}
adapters = {name: train(text) for name, text in wanted.items()}
for name, (a, b) in adapters.items():
    print(f"{name}: {answers(x_all @ W.T + s * (x_all @ a.T) @ b.T)}")
print(f"numbers in W: {W.numel()}, in an adapter: {a.numel() + b.numel()}")

# %% [markdown]
# ## Merging
#
# The thin path can be folded into the weight once, because
# $x\,W^\top + s\,x\,A^\top B^\top = x\,(W + s\,B A)^\top$. The merged layer costs nothing extra
# at run time. This is how one ships a single fine-tuned model.
#
# The figure shows adapter B: the alphabet as a diagonal, the update (its row `k` is dark blue where
# a vowel is asked; every row is a mixture of the same two, as the rank is 2), and their sum.

# %%
update = {name: s * b @ a for name, (a, b) in adapters.items()}  # [out, in] each
merged = {name: W + update[name] for name in adapters}
pictures = {"W": W, "s B A": update["B"], "W + s B A": merged["B"]}
figure, axes = plt.subplots(1, 3, figsize=(8, 3))
for ax, (title, picture) in zip(axes, pictures.items(), strict=True):
    ax.imshow(picture, cmap="RdBu", vmin=-8, vmax=8)
    ax.set(title=title, xlabel="letter asked", ylabel="letter answered")
    ax.set_xticks(range(0, SIZE, 4), LETTERS[::4])
    ax.set_yticks(range(0, SIZE, 4), LETTERS[::4])
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Three users, one batch
#
# A server answers many users in one *batch*: their inputs are the rows of one matrix, and one
# product serves all. This is the batch of all tutorials: row 0 has adapter A, row 1 has none,
# row 2 has adapter B. They ask `h`, `h` and `e`; right is `x`, `i` and `k`. Predict: if we merge A,
# for the user of row 0, which rows are right?

# %%
x = rows_of("hhe")
right = "xik"
for name, weight in {"W": W, "W + A": merged["A"], "W + B": merged["B"]}.items():
    print(f"{name:6} answers {answers(x @ weight.T)}, right is {right}")

# %% [markdown]
# No weight is right for all three, and one with both updates would give everybody both. There is
# no error and no crash, only somebody else's answer.
#
# ## Repair 1: swap
#
# Take the old update out of $W$ and put the next one in. But real models keep $W$ in bfloat16,
# with 8 bits of precision. A sum is rounded, so taking out what was put in does not give back what
# was there:

# %%
original = W.bfloat16()
swapped = original.clone()
changed = []
for _ in range(50):
    for name in "AB":
        swapped += update[name].bfloat16()  # merge; one would serve this user here
        swapped -= update[name].bfloat16()  # and take it out again
        changed.append((swapped != original).sum().item())
print(f"weights changed by the first swap: {changed[0]} of {W.numel()}, by 100: {changed[-1]}")

# %% [markdown]
# The base model of *every* user has changed, even of those who never asked for an adapter. So one
# keeps a clean $W$ too, and makes each merged weight from that. Then every swap reads and writes
# the whole model. We need no clock to see what that means; the shapes say it. Take Llama-2-7B in
# bfloat16 (2 bytes a number), with adapters of rank 16 on its seven projections:

# %%
from minilora.testing.shapes import SHAPES

shape = SHAPES["llama-2-7b"]
hidden, wide = shape["hidden_size"], shape["intermediate_size"]
# [out, in] of q, k, v, o, gate, up, down (this Llama has as many key heads as query heads)
projections = [(hidden, hidden)] * 4 + [(wide, hidden)] * 2 + [(hidden, wide)]
two = 2 * shape["num_hidden_layers"]
base_bytes = two * sum(out * width for out, width in projections)
adapter_bytes = two * sum(16 * (out + width) for out, width in projections)
print(f"projections: {base_bytes / 1e9:.2f} GB, one adapter: {adapter_bytes / 1e6:.0f} MB")

# %% [markdown]
# ## Repair 2: one model for each adapter
#
# Or keep merged copies, one an adapter. Nothing is swapped, but memory ends soon, and the batch
# shares nothing: each row reads a weight of its own.
#
# A decode step (one new token for each user) reads its weights once and does little else, so it
# cannot be faster than that traffic. Count the bytes for one token of each of our three users.

# %%
n, users, memory = len(adapters), len(x), 80e9  # bytes of a large GPU
step_bytes = {
    "swap": n * 2 * base_bytes + users * base_bytes,  # a read and a write each, then three steps
    "copies": users * base_bytes,
    "unmerged": base_bytes + n * adapter_bytes,
}
fits = {"swap": 0, "copies": int(memory / base_bytes) - 1}  # one place is the base model's
fits["unmerged"] = int((memory - base_bytes) / adapter_bytes)
print("           bytes of one token each    adapters that fit in 80 GB")
for name, count in step_bytes.items():
    print(f"{name:10} {count / 1e9:10.2f} GB {fits[name] or 'any, on the host':>25}")

# %% [markdown]
# ## The unmerged sum
#
# The last line is the way out: do not merge. The first term of the formula is the same for all
# rows and is one product. Only the thin second term is a row's own:
#
# $$y_i = x_i\,W^\top + s\,(x_i\,A_{a(i)}^\top)\,B_{a(i)}^\top$$
#
# where $a(i)$ is the adapter of row $i$, and the second term is left out where there is none.

# %%
y = x @ W.T  # [T, out], every row at once
for row, name in enumerate(["A", None, "B"]):
    if name is not None:
        a, b = adapters[name]
        y[row] += s * (x[row] @ a.T) @ b.T
oracle = torch.stack([x[0] @ merged["A"].T, x[1] @ W.T, x[2] @ merged["B"].T])
print(f"unmerged answers {answers(y)}, right is {right}")
print(f"largest difference from the merged weights: {(y - oracle).abs().max().item():.0e}")

# %% [markdown]
# All three are right, and $W$ was never written. Merged weights remain the plainest definition of
# what is right. `minilora/testing/oracle.py` keeps them for that: one request, one merged weight.
#
# ## How minilora does it
#
# All adapters of a layer lie in two stacked tensors, `lora_a_stacked [max_loras, r, in]` and
# `lora_b_stacked [max_loras, out, r]`. An adapter's place in them is its `lora_slot`: here A is in
# slot 2 and B in slot 0. $s$ is folded into $B$ when a slot is written (`minilora/lora/layers.py`,
# `write_slot`). Two ops do the thin path instead of our loop: `lora_shrink` ($h = x A^\top$, down
# to the rank) and `lora_expand` (adds $h B^\top$, up again). A `KernelMeta` tells them the slot of
# each row, -1 for none.

# %%
from minilora.ops import KernelMeta, lora_expand, lora_shrink

lora_a_stacked, lora_b_stacked = torch.zeros(4, r, SIZE), torch.zeros(4, SIZE, r)
for slot, name in ((2, "A"), (0, "B")):
    a, b = adapters[name]
    lora_a_stacked[slot], lora_b_stacked[slot] = a, s * b
meta = KernelMeta(max_tokens=3, max_loras=4)
meta.prepare([2, -1, 0], num_tokens_padded=3, num_active_loras=2)
out = x @ W.T
h = lora_shrink(x, [lora_a_stacked], meta, num_active_loras=2)
lora_expand(h, [lora_b_stacked], out, meta, num_active_loras=2)
print(f"minilora answers {answers(out)}, right is {right}")

# %% [markdown]
# ## On a GPU
#
# A decode step of the same shape, measured without and with adapters, beside what the bytes say.
# This is minilora with its own kernels and graphs, without the compiler of tutorial 10:

# %%
measured = json.loads(Path("docs/benchmarks/h200-graphs.json").read_text())
print(f"{measured['machine']}, {measured['date']}")
for step, (without, with_adapters, ratio) in measured["active"].items():
    n = int(step.split()[2])
    by_bytes = 1 + n * adapter_bytes / base_bytes
    print(
        f"{step:20} {without:5.0f} -> {with_adapters:5.0f} us: {ratio:.2f}, bytes: {by_bytes:.2f}"
    )

# %% [markdown]
# About a tenth more, where the bytes alone would be a few hundredths at most. Bytes are a lower
# bound: a step cannot be faster than its reading. The rest is not explained by these numbers. (Each
# layer has eight more launches that wait for the ones before them, so that is where to look first.)
# Such kernels, and the graphs that launch a whole step at once, are what the next tutorials are
# about.
#
# ## Check

# %%
for name, text in wanted.items():
    assert answers(x_all @ merged[name].T) == text
    assert answers(x @ merged[name].T) != right, "a merged weight should have failed somebody"
assert changed[0] > 0, "a swap should not give the weights back"
assert answers(y) == right, "the unmerged sum serves every row"
torch.testing.assert_close(y, oracle)
torch.testing.assert_close(out, oracle)
assert torch.equal(out[1], (x @ W.T)[1]), "the row without an adapter is untouched"
assert step_bytes["unmerged"] < 1.02 * base_bytes < step_bytes["copies"] / 2
assert fits["unmerged"] > 100 * fits["copies"]

# %% [markdown]
# ## What you have seen
#
# An adapter is a thin path beside a weight. Merged, it serves one user; swapped, it moves the whole
# model and wears it out; unmerged, it serves every row of one batch.
#
# Next: [tutorial 2](02_one_batch_many_adapters.md) replaces the loop over rows.
#
# Exercises:
#
# 1. Train B with `r=1`. The update is then one column times one row. Which letters are still right?
# 2. How large must an update be not to vanish in the rounding of a bfloat16 weight near 4? How many
#    of A's and B's numbers are smaller?
# 3. With how many adapters in one batch does the unmerged sum read twice the bytes of $W$?
