"""What a benchmark runs on: a model and its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minilora.config.errors import ConfigError
from minilora.config.lora import LoRARequest
from minilora.config.sampling import SamplingParams
from minilora.engine.llm import LLM
from minilora.engine.outputs import RequestOutput
from minilora.testing.shapes import make_shape, make_shape_adapter


@dataclass(frozen=True)
class Setup:
    """A model folder and adapters of it.

    Attributes:
        model: folder of a checkpoint, or of a shape's config.json.
        load_format: "dummy" for a shape.
        loras: adapters in host memory's order; the first is the most used one of a Zipf draw.
        rank: the largest rank of the adapters.
    """

    model: Path
    load_format: str
    loras: tuple[LoRARequest, ...]
    rank: int

    def llm(self, enable_lora: bool = True, **options: Any) -> LLM:
        """Start an engine; with adapters it has a slot for each, unless `max_loras` says else."""
        if enable_lora:
            lora = {"max_loras": max(1, len(self.loras)), "max_lora_rank": self.rank}
            options = {"enable_lora": True, **lora, **options}
        return LLM(self.model, load_format=self.load_format, **options)


def make_setup(
    folder: Path, *, shape: str | None, model: str | None, adapters: int, rank: int = 16
) -> Setup:
    """Make a shape with random weights, or take a checkpoint, and make random adapters for it.

    Args:
        folder: for what is made.
        shape: a name of `SHAPES`; None takes `model`.
        model: folder of a checkpoint.
        adapters: how many to make, all seven projections each.
        rank: of each adapter.
    """
    if shape is None:
        assert model is not None
        found = Path(model)
    else:
        found = make_shape(folder / shape, shape)
    loras = tuple(
        LoRARequest(f"adapter-{i}", make_shape_adapter(folder / f"a{i}", found, rank, seed=i))
        for i in range(adapters)
    )
    return Setup(found, "auto" if shape is None else "dummy", loras, rank)


def prompts(llm: LLM, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of one length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, llm.model_config.vocab_size, (count, length), generator=generator)
    return ids.tolist()


def refuse_long(llm: LLM, input_len: int, output_len: int) -> None:
    """Refuse lengths that the engine cannot serve, before anything is measured.

    Raises:
        ConfigError: prompt and answer are more than the longest context.
    """
    if input_len + output_len > llm.max_model_len:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len} are more than "
            f"max_model_len={llm.max_model_len} together; lower one of them"
        )


def fixed_length(tokens: int) -> SamplingParams:
    """Return parameters for greedy answers of exactly that many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def refuse_short(outputs: Sequence[RequestOutput], tokens: int) -> None:
    """Raise a `RuntimeError` if an answer is shorter than asked for: its time means nothing."""
    for output in outputs:
        if len(output.token_ids) != tokens:
            raise RuntimeError(f"a request ended early: {output.error or output.finish_reason}")


def in_turn(loras: Sequence[LoRARequest | None], count: int) -> list[LoRARequest | None]:
    """Deal adapters to `count` requests in turn; none of them without adapters."""
    return [loras[i % len(loras)] if loras else None for i in range(count)]
