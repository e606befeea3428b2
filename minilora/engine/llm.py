"""`LLM`: serve prompts, each with its own adapter or none, in shared batches."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from minilora.config.engine import EngineConfig
from minilora.config.errors import AdapterError, RequestError
from minilora.config.lora import LoRARequest
from minilora.config.sampling import SamplingParams
from minilora.engine.blocks import BlockPool
from minilora.engine.core import EngineCore
from minilora.engine.intake import Intake, Prompt, as_conversations, as_prompts, one_each
from minilora.engine.outputs import RequestOutput, StreamEvent, request_output
from minilora.engine.progress import progress_bar
from minilora.engine.request import Request
from minilora.engine.scheduler import Scheduler
from minilora.engine.startup import build, default_params
from minilora.engine.stream import Follower
from minilora.engine.tokenizer import Tokenizer
from minilora.lora.slots import AdapterInfo, AdapterSlots

Params = SamplingParams | Sequence[SamplingParams] | None
LoRA = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A Llama that serves many LoRA adapters in one batch.

    Safe to use from several threads: they share the steps.

    Args:
        model: folder of a Hugging Face checkpoint, or a hub id.
        **options: the keywords of `EngineConfig`, where they are described. An unknown one
            is an error that names the nearest.

    Raises:
        ConfigError: an option is unknown, out of range, or does not go with the model.
        CheckpointError: the checkpoint is missing or damaged.

    Attributes:
        tokenizer: None where the checkpoint has no tokenizer.json; prompts are then token ids.
        max_model_len: the most tokens of prompt and answer together.
        capture_report: the graphs that were captured, their seconds and bytes.

    Examples:
        >>> from minilora import LLM, LoRARequest, SamplingParams
        >>> from minilora.demo_model import demo_adapters, demo_model
        >>> llm = LLM(demo_model(), enable_lora=True, device="cpu", num_kv_blocks=64)
        >>> question = [{"role": "user", "content": "Where is the cat?"}]
        >>> pirate = LoRARequest("pirate", demo_adapters()["pirate"])
        >>> greedy = SamplingParams(temperature=0, max_tokens=64)
        >>> [o.text for o in llm.chat([question] * 2, greedy, [None, pirate], progress=False)]
        ['The cat is under the table.', "Ahoy! Th' cat be under the table, matey, arr!"]
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.config = EngineConfig(os.fspath(model), **options)
        self._system = build(self.config)
        self.model_config, self.runner = self._system.model_config, self._system.runner
        self.kv_cache, self.max_model_len = self._system.kv_cache, self._system.max_model_len
        self.capture_report = self._system.capture_report
        self.tokenizer = Tokenizer.from_folder(self._system.folder)
        self.scheduler = Scheduler(
            BlockPool(self.kv_cache.num_blocks, self.config.block_size),
            self._system.slots,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        self._intake = Intake(
            self.model_config,
            self.tokenizer,
            self._system.slots,
            max_model_len=self.max_model_len,
            seed=self.config.seed,
        )
        self._default_params = default_params(self._system.folder)
        self.core = EngineCore(
            self.runner, self.scheduler, self.max_model_len, self.config.async_scheduling
        )

    # ---- prompts in, answers out

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        lora_request: LoRA = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts; they share batches with each other and with other callers.

        Args:
            prompts: texts or lists of token ids, or a single one of either.
            sampling_params: one for all, or one a prompt; None takes the checkpoint's defaults.
            lora_request: None (the base model), one for all, or one a prompt.
            progress: show a bar where the terminal can.

        Returns:
            One output a prompt, in order. One that failed while running has
            ``finish_reason="error"`` and says why in `error`; the others are whole.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing was started.
            AdapterError: an adapter is unknown or faulty; nothing was started.
        """
        groups = self._submit(as_prompts(prompts), sampling_params, lora_request)
        try:
            with progress_bar(groups, progress) as advance:
                while not all(answer.finished for group in groups for answer in group):
                    self.core.step()
                    advance()
        finally:
            self.core.abort(answer for group in groups for answer in group)
        return [request_output(group) for group in groups]

    def chat(
        self,
        messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]],
        sampling_params: Params = None,
        lora_request: LoRA = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the tokenizer's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, or a list of such lists.
            sampling_params: as for `generate`.
            lora_request: as for `generate`.
            progress: as for `generate`.
        """
        prompts = [self.chat_token_ids(talk) for talk in as_conversations(messages)]
        return self.generate(prompts, sampling_params, lora_request, progress=progress)

    def chat_token_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return one conversation as a prompt, through the tokenizer's chat template.

        Raises:
            RequestError: there is no tokenizer or no template, or the messages are no list of
                ``{"role": ..., "content": ...}``.
        """
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, but the checkpoint has no tokenizer.json")
        text = self.tokenizer.apply_chat_template(messages)
        # The template writes the special tokens itself.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        lora_request: LoRA = None,
    ) -> Iterator[StreamEvent]:
        """Answer prompts as `generate` does, yielding each piece as it is made.

        Prompts are checked at the call. Closing the iterator aborts what is not finished.
        """
        events = self._follow(self._submit(as_prompts(prompts), sampling_params, lora_request))
        next(events)  # from here on, dropping the iterator aborts the requests
        return events  # type: ignore[return-value]

    def _follow(self, groups: list[list[Request]]) -> Iterator[StreamEvent | None]:
        followers = [
            Follower(prompt, answer) for prompt, group in enumerate(groups) for answer in group
        ]
        try:
            yield None
            while followers:
                for follower in followers:
                    yield from follower.new_events()
                followers = [follower for follower in followers if not follower.done]
                if followers:
                    self.core.step()
        finally:
            self.core.drop(answer for group in groups for answer in group)

    # ---- one request, one step

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue one prompt and return its id; `step` answers it."""
        group = self._submit([prompt], sampling_params, lora_request, polled=True)[0]
        return group[0].request_id

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what a prompt without parameters gets: the checkpoint's generation_config.json."""
        return self._default_params

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return self.core.has_work()

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of `add_request` that were finished since the last.

        A request that fails ends with ``finish_reason="error"``; `step` does not raise for it.
        """
        self.core.step()
        return self.core.take_outputs()

    def abort(self, request_id: str) -> None:
        """End all answers of a request with what they have; an unknown id is ignored.

        `step` returns no output for it.
        """
        self.core.abort_id(request_id)

    def _submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        lora_request: LoRA,
        polled: bool = False,
    ) -> list[list[Request]]:
        """Check everything, then read adapters, then queue: what is refused starts nothing."""
        params = [
            self._default_params if own is None else own
            for own in one_each("sampling_params", sampling_params, len(prompts))
        ]
        adapters = one_each("lora_request", lora_request, len(prompts))
        each = enumerate(zip(prompts, params, adapters, strict=True))
        asked = [
            self._intake.check(*one, "the prompt" if polled else f"prompt {index}")
            for index, one in each
        ]
        return self.core.submit(self._intake, self._intake.load(asked), polled)

    # ---- adapters

    @property
    def _slots(self) -> AdapterSlots:
        if self._system.slots is None:
            raise AdapterError("the engine was built without adapters; use enable_lora=True")
        return self._system.slots

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Read an adapter folder anew, under a new name or as a new version of a loaded one.

        Safe while requests run: those that use an older version finish on it.

        Raises:
            AdapterError: the folder is missing, damaged, unsupported or does not fit.
        """
        request = LoRARequest(name, path)
        if request.path is None:
            raise AdapterError(f"load_adapter needs the folder of adapter {name!r}, not None")
        return self._slots.describe(self._slots.registry.load(request.name, request.path))

    def unload_adapter(self, name: str, timeout: float | None = None) -> None:
        """Forget an adapter: new requests cannot use it, and it goes with its last user.

        Running requests are served meanwhile, by this call where no other does it.

        Args:
            name: of a loaded adapter.
            timeout: seconds to wait for its users; None waits as long as it takes.

        Raises:
            AdapterError: it is not loaded.
            TimeoutError: it is still in use; it goes when its last user is done.
        """
        with self.core.lock:
            self.core.abort_dropped()
            version = self._slots.registry.retire(name)
        if version is None:
            raise AdapterError(self._slots.registry.unknown(name))
        start = time.monotonic()
        while version.users:
            if timeout is not None and time.monotonic() - start > timeout:
                raise TimeoutError(
                    f"adapter {name!r} is still used by {version.users} requests after "
                    f"{timeout:g} s; it goes when they are done, or abort them"
                )
            self.core.step()

    def pin_adapter(self, name: str) -> None:
        """Keep an adapter in its slot, whoever else wants one; see `AdapterSlots.pin`."""
        with self.core.on_device():
            self._slots.pin(name)

    def unpin_adapter(self, name: str) -> None:
        """Let a pinned adapter be evicted again."""
        self._slots.unpin(name)

    def list_adapters(self) -> list[AdapterInfo]:
        """Return the loaded adapters, sorted by name."""
        with self.core.lock:
            self.core.abort_dropped()
            return self._slots.list_adapters()
