"""Train the demo model and its four adapters from nothing, on a CPU (about half an hour).

The base model learns a small world (`grammar.py`), then is frozen, and each adapter learns to
answer in one voice. Run it from the repository's root:

    python tutorials/demo_model/train.py --out minilora/demo_model

It writes `training_log.json` there; the one beside this file is of the weights that are shipped.
Adapters have different ranks and modules, so that the demo serves a mixed batch.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from grammar import WORLD, exercise, pairs
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from minilora.testing import make_tiny_llama

SEED, BATCH, IGNORED = 0, 32, -100
SHAPE = {
    "vocab_size": 246, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "dtype": "float32", "seed": SEED,
}  # fmt: skip
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "pirate": {"r": 4, "target_modules": [*ATTENTION, *MLP]},
    "poet": {"r": 8, "target_modules": [*ATTENTION, *MLP]},
    "robot": {"r": 16, "target_modules": [*ATTENTION, *MLP]},
    "sql": {"r": 12, "target_modules": ["o_proj", *MLP]},
}


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the ids of one chat and its labels: the loss is over the answer alone."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    reply = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + reply, [IGNORED] * len(prompt) + reply


def collate(tokenizer: Any, chats: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Return one padded batch."""
    width = max(len(ids) for ids, _ in chats)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in chats]),
        "labels": torch.tensor([ls + [IGNORED] * (width - len(ls)) for _, ls in chats]),
        "attention_mask": torch.tensor(
            [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in chats]
        ),
    }


def train(
    model: Any,
    tokenizer: Any,
    texts: list[tuple[str, str]],
    steps: int,
    lr: float,
    num_exercises: int = 0,
) -> list[list[float]]:
    """Train the weights that want gradients; return [step, loss] now and then."""
    rng, log = random.Random(SEED), []
    chats = [encode(tokenizer, *pair) for pair in texts]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.01)
    warm = max(0.1, 2 / steps)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=warm)
    for step in range(steps):
        batch = rng.sample(chats, BATCH - num_exercises)
        batch += [encode(tokenizer, *exercise(rng)) for _ in range(num_exercises)]
        loss = model(**collate(tokenizer, batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            log.append([step, round(loss.item(), 4)])
            print(f"  step {step:4d}  loss {loss.item():.4f}", flush=True)
    return log


@torch.no_grad()
def right(model: Any, tokenizer: Any, texts: list[tuple[str, str]]) -> str:
    """Return how many texts greedy decoding answers letter by letter, such as "11 of 12"."""
    count = 0
    for start in range(0, len(texts), BATCH):
        batch = collate(tokenizer, [encode(tokenizer, *p) for p in texts[start : start + BATCH]])
        best = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.argmax(-1)[:, :-1]
        labels = batch["labels"][:, 1:]
        count += int(((best == labels) | (labels == IGNORED)).all(dim=1).sum())
    return f"{count} of {len(texts)}"


def train_base(folder: Path, steps: int) -> tuple[Any, Any, dict[str, Any]]:
    """Train the base model on the whole world; save it in bfloat16."""
    make_tiny_llama(folder, **SHAPE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_config(config)  # normal(0, 0.02), as Llama starts
    start, texts = time.perf_counter(), pairs("base", WORLD)
    log = train(model, tokenizer, texts, steps, 3e-3, num_exercises=BATCH // 2)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    write_config(folder)
    report = {"pairs": len(texts), "right": right(model, tokenizer, texts), "loss": log}
    some = [exercise(random.Random(seed)) for seed in range(100)]
    report["right in exercises"] = right(model, tokenizer, some)
    report["seconds"] = round(time.perf_counter() - start)
    return model.float(), tokenizer, report


def write_config(folder: Path) -> None:
    """Write the JSON files as `make_tiny_llama` does, with the dtype that was saved."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = make_tiny_llama(scratch, **{**SHAPE, "dtype": "bfloat16"})
        for path in plain.glob("*.json"):
            shutil.copyfile(path, folder / path.name)


def tidy(out: Path, name: str) -> None:
    """Leave out PEFT's empty model card, and where the base model was on this machine."""
    (out / "README.md").unlink(missing_ok=True)
    path = out / name / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"base_model_name_or_path": "base"}, indent=2) + "\n")


def train_adapter(model: Any, tokenizer: Any, name: str, out: Path, steps: int) -> dict[str, Any]:
    """Train one voice; save it as PEFT does, in bfloat16."""
    torch.manual_seed(SEED)
    options = ADAPTERS[name]
    config = LoraConfig(task_type="CAUSAL_LM", lora_alpha=2 * options["r"], **options)
    peft = get_peft_model(model, config, adapter_name=name)
    start, texts = time.perf_counter(), pairs(name, WORLD)
    log = train(peft, tokenizer, texts, steps, 4e-3)
    for key, weight in peft.named_parameters():
        if "lora_" in key:
            weight.data = weight.data.to(torch.bfloat16)
    peft.save_pretrained(out, selected_adapters=[name])
    tidy(out, name)
    for key, weight in peft.named_parameters():
        if "lora_" in key:
            weight.data = weight.data.float()
    report = {
        **options, "pairs": len(texts), "right": right(peft, tokenizer, texts), "loss": log,
        "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    peft.unload()
    return report


def main() -> None:
    """Read the command line, train all five, write the log."""
    parser = argparse.ArgumentParser(description="train the demo model and its adapters")
    parser.add_argument("--out", type=Path, default=Path("demo_model"))
    parser.add_argument("--steps", type=int, default=1200, help="of the base model")
    parser.add_argument("--adapter-steps", type=int, default=250)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model, tokenizer, report = train_base(options.out / "base", options.steps)
    log: dict[str, Any] = {"torch": torch.__version__, "base": report}
    print("base:", report["right"], flush=True)
    model.requires_grad_(False)
    for name in ADAPTERS:
        log[name] = train_adapter(model, tokenizer, name, options.out, options.adapter_steps)
        print(f"{name}: {log[name]['right']}", flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in log.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (options.out / "training_log.json").write_text(text)


if __name__ == "__main__":
    main()
