"""The reference of the parity tests: transformers and PEFT, one prompt and adapter at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import transformers
from transformers import modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class PeftReference:
    """A checkpoint in transformers; adapters are loaded by PEFT when they are first asked for.

    With ``dtype=torch.float64`` all of it runs in float64, also the norms and rotary embeddings,
    which transformers computes in float32 whatever the model's dtype is.
    """

    def __init__(self, model_folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        with _in_float64(dtype == torch.float64):
            load = transformers.AutoModelForCausalLM.from_pretrained
            self._base: Any = load(model_folder, dtype=dtype).eval()
        self._peft: Any = None
        self._names: dict[Path, str] = {}

    @torch.no_grad()
    def logits(
        self, token_ids: Sequence[int], adapter_folder: str | Path | None = None
    ) -> torch.Tensor:
        """Return the logits after each token, ``[T, vocab]``."""
        with self._with(adapter_folder) as model:
            return model(torch.tensor([list(token_ids)])).logits[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def greedy(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        adapter_folder: str | Path | None = None,
        eos: Iterable[int] = (),
    ) -> list[int]:
        """Return the greedy continuation, with a KV cache; a token of `eos` ends it."""
        answer: list[int] = []
        cache, new, ends = transformers.DynamicCache(), list(token_ids), set(eos)
        with self._with(adapter_folder) as model:
            while len(answer) < max_tokens and not ends.intersection(answer[-1:]):
                out = model(torch.tensor([new]), **with_cache(self._base, cache))
                new = [int(out.logits[0, -1].argmax())]
                answer += new
        return answer

    @contextlib.contextmanager
    def _with(self, adapter_folder: str | Path | None) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_in_float64(self.dtype == torch.float64))
            if adapter_folder is not None:
                self._activate(Path(adapter_folder))
            elif self._peft is not None:
                stack.enter_context(self._peft.disable_adapter())
            yield self._base if self._peft is None else self._peft

    def _activate(self, folder: Path) -> None:
        if folder not in self._names:
            self._names[folder] = f"adapter{len(self._names)}"
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".*(is_gradient_checkpointing|tied layer)"
                )
                warnings.filterwarnings("error", message="Found missing adapter keys")
                self._load(folder, self._names[folder])
            self._peft.to(self.dtype).eval()
        self._peft.set_adapter(self._names[folder])

    def _load(self, folder: Path, name: str) -> None:
        if self._peft is None:
            self._peft = peft.PeftModel.from_pretrained(self._base, folder, name)
        else:
            self._peft.load_adapter(folder, name)


def with_cache(model: Any, cache: transformers.DynamicCache) -> dict[str, Any]:
    """Return the keywords that let a forward of a transformers model use `cache`.

    transformers 5.24 calls it `cache`, 5.17 `past_key_values`, and each passes silently over the
    other's name.
    """
    known = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}


@contextlib.contextmanager
def _in_float64(active: bool) -> Iterator[None]:
    """Let transformers' own code read ``torch.float32`` as ``torch.float64``.

    Its norms, rotary embeddings and rope scalings name float32 in their source. Seen through
    this, the same formulas run in float64, and nothing of the reference is written by us.
    """
    with contextlib.ExitStack() as stack:
        for module in (modeling_llama, modeling_mistral, modeling_rope_utils) if active else ():
            stack.enter_context(mock.patch.object(module, "torch", _wide_torch()))
        if active:
            stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


@functools.cache
def _wide_torch() -> types.ModuleType:
    wide = types.ModuleType("torch")
    wide.__dict__.update(torch.__dict__)
    wide.__dict__.update(float=torch.float64, float32=torch.float64)
    return wide
