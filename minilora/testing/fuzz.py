"""`fuzz`: random traffic on the signature checkpoint, where a wrong token needs no tolerance.

Requests arrive and are aborted, adapters are loaded, replaced and unloaded between steps, so
that graphs are replayed in every order with every mix of adapters.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from minilora.config.lora import LoRARequest
from minilora.config.sampling import SamplingParams
from minilora.engine.llm import LLM

VOCAB = 32  # of the signature checkpoint
NAMES = ("a", "b", "c", "d", "e")


@dataclass
class FuzzReport:
    """What a run did.

    Attributes:
        steps: engine steps.
        answers: requests that finished.
        tokens: tokens compared.
        wrong: sentences about wrong answers, at most ten.
    """

    steps: int = 0
    answers: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def fuzz(llm: LLM, signs: Mapping[str, tuple[str, int]], steps: int, seed: int = 0) -> FuzzReport:
    """Run random traffic for a number of steps and compare every token.

    Args:
        llm: an engine on `make_signature_llama`, with LoRA and at least four requests a step.
        signs: adapters of `make_signature_adapter`: any name -> (folder, the token it says).
        steps: engine steps to run.
        seed: the same seed gives the same traffic.
    """
    return _Fuzz(llm, signs, seed).run(steps)


class _Fuzz:
    def __init__(self, llm: LLM, signs: Mapping[str, tuple[str, int]], seed: int) -> None:
        self._llm, self._signs = llm, list(signs.values())
        self._rng, self._report = random.Random(seed), FuzzReport()
        self._loaded: dict[str, int] = {}
        self._expected: dict[str, list[int]] = {}

    def run(self, steps: int) -> FuzzReport:
        actions = [self._arrive] * 8 + [self._load] * 2 + [self._unload, self._abort]
        while self._report.steps < steps:
            for _ in range(self._rng.randrange(3)):
                self._rng.choice(actions)()
            if self._llm.has_unfinished_requests():
                self._step()
            else:
                self._arrive()
        while self._llm.has_unfinished_requests():
            self._step()
        for name in self._loaded:
            self._llm.unload_adapter(name)
        return self._report

    def _arrive(self) -> None:
        if len(self._expected) >= 3 * self._llm.config.max_num_seqs:
            return
        rng = self._rng
        length, last = rng.choice([1, 2, 3, 7, 17, 40]), rng.randrange(VOCAB)
        room = min(rng.randint(1, 12), self._llm.max_model_len - length)
        name = rng.choice([None, *self._loaded])
        lora = None if name is None else LoRARequest(name)
        params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
        # The part of the prompt that an adapter stamps must be more than half, see `signature`.
        request = self._llm.add_request([2] * (length - 1) + [last], params, lora)
        base = [(last + 1 + i) % VOCAB for i in range(room)]
        self._expected[request] = base if name is None else [self._loaded[name]] * room

    def _load(self) -> None:
        name = self._rng.choice(NAMES)
        folder, token = self._rng.choice(self._signs)
        self._llm.load_adapter(name, folder)
        self._loaded[name] = token

    def _unload(self) -> None:
        if self._loaded:
            name = self._rng.choice(sorted(self._loaded))
            del self._loaded[name]
            with contextlib.suppress(TimeoutError):  # then it goes with its last user
                self._llm.unload_adapter(name, timeout=0)

    def _abort(self) -> None:
        if self._expected:
            request = self._rng.choice(sorted(self._expected))
            self._llm.abort(request)
            del self._expected[request]

    def _step(self) -> None:
        self._report.steps += 1
        for output in self._llm.step():
            want = self._expected.pop(output.request_id)
            self._report.answers += 1
            self._report.tokens += len(want)
            if output.token_ids != want and len(self._report.wrong) < 10:
                said = output.error or output.token_ids
                self._report.wrong.append(f"step {self._report.steps}: {said}, not {want}")
