"""`Follower`: what is new in an answer since it was last looked at."""

from __future__ import annotations

from collections.abc import Iterator

from minilora.engine.outputs import StreamEvent, completion
from minilora.engine.request import Request


class Follower:
    """Follow one answer for `LLM.stream`; steps may be run by anybody meanwhile."""

    def __init__(self, prompt_index: int, request: Request) -> None:
        self._prompt_index, self._request = prompt_index, request
        self._num_chars = self._num_tokens = 0
        self.done = False

    def new_events(self) -> Iterator[StreamEvent]:
        """Yield one event if there are new tokens, new text, or an end."""
        request = self._request
        finished = request.finished  # before the rest is read, so that nothing comes after it
        output = completion(request)
        text, tokens = output.text[self._num_chars :], output.token_ids[self._num_tokens :]
        if not (text or tokens or finished):
            return
        self._num_chars, self._num_tokens = len(output.text), len(output.token_ids)
        self.done = finished
        yield StreamEvent(
            request_id=request.request_id,
            prompt_index=self._prompt_index,
            index=request.index,
            text=text,
            token_ids=tokens,
            finish_reason=output.finish_reason if finished else None,
            output=output,
        )
