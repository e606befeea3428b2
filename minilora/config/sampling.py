"""`SamplingParams`: how the tokens of one request are chosen (names and defaults as in vLLM)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minilora.config.checks import check_bool, check_int, check_number, strict_keywords
from minilora.config.errors import ConfigError, shown

_WHERE = "SamplingParams: "
_LARGEST_TOKEN = _LONGEST = 2**31 - 1
_INTS = {
    "n": (1, 1024),
    "top_k": (-1, _LARGEST_TOKEN),
    "seed": (0, 2**63 - 1),
    "max_tokens": (1, _LONGEST),
    "min_tokens": (0, _LONGEST),
    "logprobs": (0, 1024),
}
_MAY_BE_NONE = ("seed", "logprobs")


@strict_keywords
@dataclass(frozen=True)
class SamplingParams:
    """How to sample the tokens of one request. Fields, defaults and meanings follow vLLM.

    Attributes:
        n: answers for each prompt; answer ``i`` of a seeded request uses ``seed + i``.
        temperature: 0 is greedy (the lowest token id wins an exact tie).
        top_k: sample among the k most likely tokens; 0 or -1 means all of them.
        top_p: sample among the most likely tokens that together reach this probability.
        min_p: drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: over 1 discourages the tokens of the prompt and the answer
            (CTRL, arXiv:1909.05858: positive logits are divided by it, others multiplied).
        seed: makes this request's draws repeatable, whatever else is in the batch.
        max_tokens: the most tokens to generate; the answer also ends at `max_model_len`.
        min_tokens: no end token and no stop token before this many.
        stop: texts that end the answer; the text returned stops before the first of them.
        stop_token_ids: tokens that end the answer like an end token.
        ignore_eos: go on after an end token of the model.
        logprobs: return the log probabilities of this many most likely tokens, and of the
            sampled one, for every generated token (of the raw logits, as in vLLM).

    Raises:
        ConfigError: a value out of range, by name; an unknown keyword with the nearest one.

    Examples:
        >>> SamplingParams(temperature=0, max_tokens=8).greedy
        True
        >>> SamplingParams(temprature=0)
        Traceback (most recent call last):
        ...
        minilora.config.errors.UnknownOptionError: SamplingParams has no option 'temprature'; did...
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()

    def _check_numbers(self) -> None:
        """Check numbers, and keep NumPy's as Python's."""
        for name, (low, high) in _INTS.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                number = check_int(_WHERE, name, getattr(self, name), low, high)
                object.__setattr__(self, name, number)
        check_number(_WHERE, "temperature", self.temperature, 0.0, 100.0)
        if check_number(_WHERE, "top_p", self.top_p, 0.0, 1.0) == 0.0:
            raise ConfigError(f"{_WHERE}top_p=0 leaves no token; use temperature=0 for greedy")
        check_number(_WHERE, "min_p", self.min_p, 0.0, 1.0)
        check_number(_WHERE, "repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"{_WHERE}min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "raise max_tokens"
            )
        check_bool(_WHERE, "ignore_eos", self.ignore_eos)

    def _check_stops(self) -> None:
        """Check and keep stop strings and tokens as tuples of our own, whatever was given."""
        stops = _listed("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ConfigError(f"{_WHERE}stop={shown(stops)} must hold texts that are not empty")
        tokens = tuple(
            check_int(_WHERE, "stop_token_ids", token, 0, _LARGEST_TOKEN)
            for token in _listed("stop_token_ids", self.stop_token_ids)
        )
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tokens)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """Return the defaults that a checkpoint's `generation_config.json` asks for, as vLLM does.

        Raises:
            ConfigError: one of its fields is out of range.
        """
        fields = {
            "temperature": "temperature",
            "top_k": "top_k",
            "top_p": "top_p",
            "min_p": "min_p",
            "repetition_penalty": "repetition_penalty",
            "max_new_tokens": "max_tokens",
        }
        found = {
            ours: config[theirs]
            for theirs, ours in fields.items()
            if config.get(theirs) is not None
        }
        return cls(**found)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _listed(name: str, given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, (bytes, str)) or not isinstance(given, Iterable):
        raise ConfigError(f"{_WHERE}{name}={shown(given)} must be a list")
    return tuple(given)
