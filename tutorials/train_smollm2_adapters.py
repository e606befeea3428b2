# %% [markdown]
# # Train two small LoRA adapters for a real Llama, on a CPU
#
# SmolLM2-135M-Instruct answers a question in plain English. Minutes of training on two cores
# give it two other tongues: `sql` answers with a query, `pirate` as a pirate would. The texts
# come from grammars below, so nothing but the model is downloaded. Run it with
# `python tutorials/train_smollm2_adapters.py --out adapters`.

# %%
from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from minilora.fetch import fetch_smollm2

SEED = 0
BATCH = 8
Pair = tuple[str, str]  # question, answer

# %% [markdown]
# ## Questions about tables, answered in SQL
#
# The last two tables are seen in no training step: the held-out loss is over questions about them.

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
# ## From pairs to batches
#
# The question goes through the model's chat template; the loss is over the answer alone.

# %%
IGNORED = -100  # transformers leaves these labels out of the loss


def encode(tokenizer: Any, pair: Pair) -> tuple[list[int], list[int]]:
    """Return the token ids of one chat and its labels."""
    chat = [{"role": "user", "content": pair[0]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(pair[1] + tokenizer.eos_token, add_special_tokens=False)
    return prompt + answer, [IGNORED] * len(prompt) + answer


def batches(tokenizer: Any, pairs: list[Pair]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield padded batches in the order of `pairs`; every tensor is [B, T]."""
    for start in range(0, len(pairs), BATCH):
        rows = [encode(tokenizer, pair) for pair in pairs[start : start + BATCH]]
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
# Both adapters have rank 8, on other modules each: one batch will serve them together.

# %%


@dataclass
class Lesson:
    """What one adapter learns, and where in the model it sits."""

    train: list[Pair]
    held_out: list[Pair]
    target_modules: list[str]


def lessons() -> dict[str, Lesson]:
    """Return the two lessons; the same texts every time."""
    return {
        "sql": Lesson(*sql_texts(random.Random(SEED)), ["q_proj", "v_proj"]),
        "pirate": Lesson(
            *pirate_texts(random.Random(SEED)), ["q_proj", "v_proj", "o_proj", "down_proj"]
        ),
    }


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any, pairs: list[Pair]) -> float:
    """Mean loss of an answer's token, in nats."""
    total = count = 0.0
    for batch in batches(tokenizer, pairs):
        tokens = (batch["labels"] != IGNORED).sum().item()
        total += model(**batch).loss.item() * tokens
        count += tokens
    return total / count


def train(model: Any, tokenizer: Any, pairs: list[Pair], steps: int) -> None:
    """Train the active adapter, the only weights that ask for a gradient."""
    rng = random.Random(SEED)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    for step in range(steps):
        (batch,) = batches(tokenizer, rng.sample(pairs, BATCH))
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"  step {step:3d}  loss {loss.item():.3f}", flush=True)


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """Return the greedy answer to one question."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    return str(tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True))


# %%
def run(model_folder: Path, out: Path, steps: int, quick: bool) -> None:
    """Train, report and save every adapter as a PEFT folder: `out`/sql and `out`/pirate."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for name, lesson in lessons().items():
        config = LoraConfig(
            task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=lesson.target_modules
        )
        if hasattr(model, "peft_config"):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
        model.set_adapter(name)
        pairs = lesson.held_out[:BATCH] if quick else lesson.held_out
        start, before = time.perf_counter(), held_out_loss(model, tokenizer, pairs)
        print(f"{name}: {len(lesson.train)} pairs, held-out loss {before:.3f}", flush=True)
        train(model, tokenizer, lesson.train, steps)
        after, seconds = held_out_loss(model, tokenizer, pairs), time.perf_counter() - start
        model.save_pretrained(out, selected_adapters=[name])
        size = (out / name / "adapter_model.safetensors").stat().st_size
        print(f"{name}: held-out loss {before:.3f} -> {after:.3f} in {seconds:.0f} s")
        print(f"{name}: saved to {out / name} ({size / 1e6:.1f} MB)", flush=True)
    show(model, tokenizer, quick)


def show(model: Any, tokenizer: Any, quick: bool) -> None:
    """Ask the base model and both adapters the same questions, none of them trained on."""
    questions = ("What is the highest weight of the animals?", "What is a school?")
    for question in questions[:1] if quick else questions:
        print(f"\n{question}")
        with model.disable_adapter():
            print(f"  base:   {answer(model, tokenizer, question)}")
        for name in lessons():
            model.set_adapter(name)
            print(f"  {name + ':':7} {answer(model, tokenizer, question)}", flush=True)


# %%
def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="train two LoRA adapters for SmolLM2 on a CPU")
    parser.add_argument("--model", type=Path, help="its folder (default: fetch it once)")
    parser.add_argument("--out", type=Path, default=Path("adapters"), help="default: adapters")
    parser.add_argument("--steps", type=int, default=40, help="a lesson's steps (default: 40)")
    parser.add_argument("--quick", action="store_true", help="2 steps each, to see that it runs")
    options = parser.parse_args()
    steps = 2 if options.quick else options.steps
    run(options.model or fetch_smollm2(), options.out, steps, options.quick)


if __name__ == "__main__":
    main()
