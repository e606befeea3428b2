"""`LLM`: serve prompts, each with its own adapter or none, in shared batches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from minilora.config.engine import EngineConfig
from minilora.config.errors import AdapterError, RequestError
from minilora.config.lora import LoRARequest
from minilora.config.sampling import SamplingParams
from minilora.engine.blocks import BlockPool
from minilora.engine.commit import commit_token, fail, finish_text
from minilora.engine.intake import Intake, Prompt, as_prompts, one_each
from minilora.engine.outputs import RequestOutput, StreamEvent, request_output
from minilora.engine.progress import progress_bar
from minilora.engine.request import Request
from minilora.engine.sampler import SampledToken, SamplingRow, sample
from minilora.engine.scheduler import ScheduledStep, Scheduler
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
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.config = EngineConfig(os.fspath(model), **options)
        self._system = build(self.config)
        self.model_config, self.runner = self._system.model_config, self._system.runner
        self.max_model_len = self._system.max_model_len
        self.tokenizer = Tokenizer.from_folder(self._system.folder)
        self.scheduler = Scheduler(
            BlockPool(self._system.kv_cache.num_blocks, self.config.block_size),
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
        self._answers: dict[str, list[Request]] = {}
        self._lock = threading.RLock()

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
        groups = self._submit(prompts, sampling_params, lora_request)
        try:
            with progress_bar(groups, progress) as advance:
                while not all(answer.finished for group in groups for answer in group):
                    self.step()
                    advance()
        finally:
            self._abort([answer for group in groups for answer in group])
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
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, but the checkpoint has no tokenizer.json")
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if single else messages
        texts = [self.tokenizer.apply_chat_template(talk) for talk in conversations]
        # The template writes the special tokens itself.
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, sampling_params, lora_request, progress=progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        lora_request: LoRA = None,
    ) -> Iterator[StreamEvent]:
        """Answer prompts as `generate` does, yielding each piece as it is made.

        Prompts are checked at the call. Closing the iterator aborts what is not finished.
        """
        events = self._follow(self._submit(prompts, sampling_params, lora_request))
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
                    self.step()
        finally:
            self._abort([answer for group in groups for answer in group])

    # ---- one request, one step

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue one prompt and return its id; `step` answers it."""
        group = self._submit([prompt], sampling_params, lora_request)[0]
        return group[0].request_id

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what a prompt without parameters gets: the checkpoint's generation_config.json."""
        return self._default_params

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_requests

    def step(self) -> list[RequestOutput]:
        """Run one step: schedule, execute, commit. Return the outputs that it finished."""
        with self._lock:
            step = self.scheduler.schedule()
            sampled = self._execute(step)
            return self._commit(step, sampled)

    def _execute(self, step: ScheduledStep) -> list[SampledToken]:
        if not step.requests:
            return []
        try:
            logits = self.runner.execute(step.batch)
            return sample(logits, [_sampling_row(request) for request in step.sampling])
        except Exception as error:
            for request in step.requests:  # the engine goes on without them
                fail(request, f"the step failed: {type(error).__name__}: {error}")
            self._commit(step, [])
            raise

    def _commit(self, step: ScheduledStep, sampled: list[SampledToken]) -> list[RequestOutput]:
        for request, row in zip(step.requests, step.batch.rows, strict=True):
            request.num_computed += len(row.token_ids)
        for request, token in zip(step.sampling, sampled, strict=False):
            commit_token(request, token, self.max_model_len)
        touched = (*step.failed, *step.requests)
        return self._finish([request for request in touched if request.finished])

    def _finish(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Give back what finished requests hold; return the outputs that are now whole."""
        for request in requests:
            self.scheduler.remove(request)
        ids = dict.fromkeys(request.request_id for request in requests)
        whole = [name for name in ids if all(answer.finished for answer in self._answers[name])]
        return [request_output(self._answers.pop(name)) for name in whole]

    def abort(self, request_id: str) -> None:
        """End all answers of a request with what they have; an unknown id is ignored."""
        with self._lock:
            self._abort(list(self._answers.get(request_id, ())))

    def _abort(self, requests: Sequence[Request]) -> None:
        with self._lock:
            unfinished = [request for request in requests if not request.finished]
            for request in unfinished:
                request.finish_reason = "abort"
                finish_text(request)
            self._finish(unfinished)

    def _submit(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params, lora_request: LoRA
    ) -> list[list[Request]]:
        """Check everything first, then queue: what is refused leaves nothing behind."""
        listed = as_prompts(prompts)
        params = one_each("sampling_params", sampling_params, len(listed))
        adapters = one_each("lora_request", lora_request, len(listed))
        groups = [
            self._intake.requests(prompt, param or self._default_params, adapter, f"prompt {index}")
            for index, (prompt, param, adapter) in enumerate(
                zip(listed, params, adapters, strict=True)
            )
        ]
        with self._lock:
            for group in groups:
                self._answers[group[0].request_id] = group
                for request in group:
                    self.scheduler.add(request)
        return groups

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
        assert request.path is not None
        self._slots.registry.load(request.name, request.path)
        return next(info for info in self.list_adapters() if info.name == name)

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
        version = self._slots.registry.get(name)
        self._slots.registry.retire(name)
        start = time.monotonic()
        while version.users:
            if timeout is not None and time.monotonic() - start > timeout:
                raise TimeoutError(
                    f"adapter {name!r} is still used by {version.users} requests after "
                    f"{timeout:g} s; it goes when they are done, or abort them"
                )
            self.step()

    def pin_adapter(self, name: str) -> None:
        """Keep an adapter in its slot, whoever else wants one; see `AdapterSlots.pin`."""
        with self._lock:
            self._slots.pin(name)

    def unpin_adapter(self, name: str) -> None:
        """Let a pinned adapter be evicted again."""
        self._slots.unpin(name)

    def list_adapters(self) -> list[AdapterInfo]:
        """Return the loaded adapters, sorted by name."""
        return self._slots.list_adapters()


def _sampling_row(request: Request) -> SamplingRow:
    return SamplingRow(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        rng=request.rng,
        banned_token_ids=request.banned_token_ids(),
    )
