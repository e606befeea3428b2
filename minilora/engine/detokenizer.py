"""`Detokenizer`: the text of an answer, token by token, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from minilora.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no character, or not yet one
# The window is cut back to this many tokens. The first 3 of a character's 4 bytes may be
# waiting for the last, so 3 tokens can be undecided; one more keeps the rest from being the
# beginning of a text, whose leading space some tokenizers drop.
_KEPT, _WINDOW = 4, 8


class Detokenizer:
    """Turn tokens into text as they come, and watch for stop strings.

    The pieces that `push` and `flush` return add up to `text`, which at the end is
    ``tokenizer.decode(all tokens)``, or what comes before the first stop string in it: the one
    that is complete first, as in vLLM (of several that end together, the longest). So it does
    not matter how the text is divided into tokens.

    No piece ends inside a UTF-8 character, or holds a part of a stop string. Text of tokens like
    ``<0xE2>`` comes with the first other token, since the library decodes a run of them as a
    whole: one wrong byte makes all of them replacement characters. Work per token is bounded.

    This holds for byte-level and SentencePiece-like tokenizers, which is what Llamas have.

    Args:
        tokenizer: of the checkpoint.
        stop_strings: none of them empty.
        prompt_token_ids: what the answer continues. The last few are decoded along, as in vLLM:
            a SentencePiece-like tokenizer drops the space before the first word of a text, and
            an answer is not the beginning of one.

    Attributes:
        stop_string: the one that ended the text; tokens after it are ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = [_StopString(text) for text in stop_strings]
        self._window = _tail(tokenizer, prompt_token_ids)  # the last tokens
        # Characters of the window's text that were passed on, or belong to the prompt.
        self._decoded = len(tokenizer.decode(self._window))
        self._held = ""  # decoded, but may be the beginning of a stop string
        self._pieces: list[str] = []
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """What was returned so far."""
        return "".join(self._pieces)  # only read: another thread may be pushing

    def token_text(self, token_id: int) -> str:
        """Return the text of one token on its own, as `Logprob.decoded_token` shows it."""
        return self._tokenizer.token_text(token_id)

    def push(self, token_id: int, watch: bool = True) -> str:
        """Add a token and return the new text that is settled, often some of earlier tokens.

        Without `watch`, a stop string in this token's text does not count (`min_tokens`).
        """
        if self.stop_string is not None or self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._window)
        undecided = int(text.endswith(_REPLACEMENT))  # at most one: a character's first bytes
        new = text[self._decoded : len(text) - undecided]
        if len(self._window) > _WINDOW:
            del self._window[:-_KEPT]
            text = self._tokenizer.decode(self._window)
        self._decoded = len(text) - undecided
        return self._release(new, watch)

    def flush(self) -> str:
        """Return the rest at the end of the answer. A stop string may still turn up in it."""
        if self.stop_string is not None:
            return ""
        new = self._tokenizer.decode(self._window)[self._decoded :]
        self._window, self._decoded = [], 0
        piece = self._release(new)
        if self.stop_string is None:
            self._pieces.append(self._held)
            piece, self._held = piece + self._held, ""
        return piece

    def _release(self, new: str, watch: bool = True) -> str:
        """Return what can be shown of the held text and `new`, cut before a stop string."""
        text = self._held + new
        shown = self._watch(new) if self._stops and watch else len(text)
        piece, self._held = text[:shown], text[shown:]
        self._pieces.append(piece)
        return piece

    def _watch(self, new: str) -> int:
        """Look for stop strings in `new`; return how long the held text and `new` may be shown."""
        for end, character in enumerate(new, len(self._held) + 1):
            complete = [stop for stop in self._stops if stop.complete_with(character)]
            if complete:
                self.stop_string = max((stop.text for stop in complete), key=len)
                return end - len(self.stop_string)
        return len(self._held) + len(new) - max(stop.matched for stop in self._stops)


def _tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return the last tokens that have a text of their own; bytes may be half a character."""
    tail: list[int] = []
    for token in reversed(token_ids[-_WINDOW:]):
        if tokenizer.is_byte(token) or len(tail) == _KEPT:
            break
        if not tokenizer.is_silent(token):
            tail.insert(0, token)
    return tail if not tokenizer.decode(tail).endswith(_REPLACEMENT) else []


class _StopString:
    """How much of a stop string the text ends with (the automaton of Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        # For each prefix, the length of the longest shorter one that it ends with.
        self._fallback = [0] * len(text)
        for place in range(1, len(text)):
            self._fallback[place] = self._grow(self._fallback[place - 1], text[place])

    def complete_with(self, character: str) -> bool:
        """Take one more character of the text; return whether the stop string is complete."""
        self.matched = self._grow(self.matched, character)
        return self.matched == len(self.text)

    def _grow(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)
