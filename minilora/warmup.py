"""What happens before the first request: kernels are compiled and graphs are captured.

Everything runs on dummy batches in the KV block that belongs to nobody. They name adapter slots
directly, as many as a graph's key says, and leave no trace in `AdapterSlots`: a slot that holds
no adapter has rank 0, and the kernels are launched all the same. (With no adapter active they
would not be, and the graph would never apply one: TGI pull 2180.)
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.progress import track

from minilora.batch import NO_LORA, PADDING_BLOCK, Batch, BatchDescriptor, BatchRow, GraphMode
from minilora.config.errors import ConfigError, is_full_memory
from minilora.graphs.budget import GraphCosts, most_useful
from minilora.graphs.cuda import frozen_gc
from minilora.graphs.dispatcher import GraphKey
from minilora.runner import ModelRunner

logger = logging.getLogger("minilora")
MIB = 1 << 20


@dataclass
class CaseReport:
    """The graphs of one LoRA case.

    Attributes:
        mode: FULL or PIECEWISE.
        num_active_loras: groups in their grid; 0 is the case without LoRA.
        graphs: how many.
        seconds: that their capture took.
        memory: bytes of the graphs themselves, beyond the pool that all share.
    """

    mode: GraphMode
    num_active_loras: int
    graphs: int = 0
    seconds: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class CaptureReport:
    """What was captured.

    Attributes:
        cases: by mode and number of adapters.
        pool_memory: bytes of the pool that all graphs share.
        dropped: keys left out because of `max_graph_memory`.
    """

    cases: tuple[CaseReport, ...] = ()
    pool_memory: int = 0
    dropped: tuple[GraphKey, ...] = ()

    @property
    def graphs(self) -> int:
        """Graphs captured."""
        return sum(case.graphs for case in self.cases)

    @property
    def seconds(self) -> float:
        """Seconds of all captures."""
        return sum(case.seconds for case in self.cases)

    @property
    def memory(self) -> int:
        """Bytes of all graphs and of the pool."""
        return self.pool_memory + sum(case.memory for case in self.cases)

    def __str__(self) -> str:
        """Say it in one line."""
        text = f"{self.graphs} graphs in {self.seconds:.1f} s, {self.memory / MIB:.1f} MiB"
        return f"{text}, {len(self.dropped)} dropped" if self.dropped else text


class WarmUp:
    """Compiles and captures what a runner will need.

    Args:
        runner: whose dispatcher says what that is.
        max_num_seqs: the most requests of a step.
        max_model_len: the most tokens of a request.
    """

    def __init__(self, runner: ModelRunner, *, max_num_seqs: int, max_model_len: int) -> None:
        self._runner, self._max_num_seqs = runner, max_num_seqs
        self._max_model_len = max_model_len

    def run(self, max_memory: int | None = None, progress: bool = False) -> CaptureReport:
        """Compile the kernels of eager steps, then capture the dispatcher's keys, largest first.

        Args:
            max_memory: bytes that the graphs may take; the least useful keys are dropped.
            progress: show a bar.

        Raises:
            ConfigError: there is not enough memory; says how much was needed.
        """
        self.compile_eager_steps()
        runner = self._runner
        if runner.backend is None or not runner.dispatcher.keys:
            return CaptureReport()
        dropped = () if max_memory is None else self._drop_beyond(max_memory)
        cases = self._capture_all(progress)
        runner.backend.check_addresses()
        if self._on_cuda:  # what eager gaps took on the capture's stream is of no use on ours
            torch.cuda.empty_cache()
        return CaptureReport(tuple(cases.values()), runner.backend.pool_memory, dropped)

    def _capture_all(self, progress: bool) -> dict[tuple[GraphMode, int], CaseReport]:
        cases: dict[tuple[GraphMode, int], CaseReport] = {}
        keys = self._runner.dispatcher.keys
        with self._explaining_memory(cases), frozen_gc():
            for key in track(keys, "capturing graphs", disable=not progress, transient=True):
                count = key.descriptor.num_active_loras
                case = cases.setdefault((key.mode, count), CaseReport(key.mode, count))
                self._capture(key, case)
        return cases

    @contextmanager
    def _explaining_memory(self, cases: dict[tuple[GraphMode, int], CaseReport]) -> Iterator[None]:
        """Turn the errors of full memory, of CUDA's allocator and of the CPU's, into a sentence."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_full_memory(error):
                raise
            raise ConfigError(self._not_enough(cases)) from error

    def _capture(self, key: GraphKey, case: CaseReport) -> None:
        start = time.perf_counter()
        self._runner.capture(key, self.dummy_batch(key.descriptor))
        case.seconds += time.perf_counter() - start
        case.memory += self._runner.graphs[key].memory
        case.graphs += 1

    def _drop_beyond(self, max_memory: int) -> tuple[GraphKey, ...]:
        dispatcher, costs = self._runner.dispatcher, self.measure_costs()
        kept = set(most_useful(dispatcher.keys, costs, max_memory))
        dropped = tuple(key for key in dispatcher.keys if key not in kept)
        if dropped:
            wanted = -(-costs.of(dispatcher.keys) // MIB)  # as the option: whole ones
            logger.warning(
                "max_graph_memory=%d MiB holds %d of %d graphs (all need about %d MiB); steps "
                "that miss theirs take a larger one or run eagerly",
                *(max_memory // MIB, len(kept), len(dispatcher.keys), wanted),
            )
            dispatcher.drop(dropped)
        return dropped

    def measure_costs(self) -> GraphCosts:
        """Capture the largest graph of each mode and throw it away; return what they took."""
        runner = self._runner
        assert runner.backend is not None
        largest: dict[GraphMode, GraphKey] = {}
        for key in runner.dispatcher.keys:
            largest.setdefault(key.mode, key)
        backend, graphs = runner.backend, runner.graphs
        runner.backend, runner.graphs = backend.fresh(), {}
        try:
            with self._explaining_memory({}), frozen_gc():
                for key in largest.values():
                    runner.capture(key, self.dummy_batch(key.descriptor))
            each = {key.mode: runner.graphs[key].memory for key in largest.values()}
            rows = max(key.descriptor.num_tokens for key in largest.values())
            return GraphCosts(each, runner.backend.pool_memory / rows)
        finally:
            runner.backend, runner.graphs = backend, graphs
            if self._on_cuda:  # the next capture gets none of the memory that torch keeps
                torch.cuda.empty_cache()

    def _not_enough(self, cases: dict[tuple[GraphMode, int], CaseReport]) -> str:
        report = CaptureReport(tuple(cases.values()), self._pool_memory())
        done, total = report.graphs, len(self._runner.dispatcher.keys)
        needed = report.pool_memory + (report.memory - report.pool_memory) * total / max(1, done)
        return (
            f"LLM: the memory was full after {done} of {total} graphs, which took "
            f"{report.memory / MIB:.0f} MiB; all need about {max(needed, report.memory) / MIB:.0f} "
            "MiB or more; lower gpu_memory_utilization, max_num_seqs, max_loras or capture_sizes, "
            "set max_graph_memory (MiB) to serve with fewer graphs, or use graph='none'"
        )

    def _pool_memory(self) -> int:
        return 0 if self._runner.backend is None else self._runner.backend.pool_memory

    def compile_eager_steps(self) -> None:
        """Run one layer on every kind of step that can run without a graph.

        Triton compiles a kernel when it is first launched, torch.compile a function when it is
        first called, and the step that does it waits. Where nothing is compiled there is nothing
        to do.
        """
        if not (self._on_cuda or self._runner.model.compiled):
            return
        for count in self._runner.dispatcher.eager_counts:
            for rows in self._eager_rows(count):
                uniform = rows <= self._max_num_seqs
                self._run_one_layer(BatchDescriptor(rows, count, uniform))
                if uniform and rows > 1:
                    self._run_one_layer(BatchDescriptor(rows, count, False))
        self._run_one_layer(BatchDescriptor(1, 0, True), longest=True)

    @property
    def _on_cuda(self) -> bool:
        return self._runner.buffers.packed.tensor.is_cuda

    def _run_one_layer(self, descriptor: BatchDescriptor, longest: bool = False) -> None:
        """Run one layer on a dummy batch; `longest`: as if the contexts could be the longest."""
        runner, batch = self._runner, self.dummy_batch(descriptor)
        step = runner.buffers.write(batch, descriptor, GraphMode.NONE)
        if longest:  # attention splits long contexts, with kernels of their own
            step = dataclasses.replace(step, max_context_len=self._max_model_len)
        with torch.no_grad():
            runner.sampled_logits(runner.forward(step, depth=1), step, batch)

    def _eager_rows(self, count: int) -> list[int]:
        """Return row counts that together need every kernel that an eager step can need."""
        tokens = self._runner.buffers.meta.max_tokens
        most = min(tokens, self._max_num_seqs * self._max_model_len)
        rows = {1, 2, most}
        if count and self._on_cuda:
            layers = {layer.shape_key: layer for layer in self._runner.model.lora_layers()}
            for layer in layers.values():
                rows.update(layer.rows_to_warm_up(most, count))
        return sorted(row for row in rows if row <= most)

    def dummy_batch(self, descriptor: BatchDescriptor) -> Batch:
        """Return a batch of exactly these rows, with exactly these many adapters.

        Requests lie in the padding block, from position 0 on; the first ones have the adapters.
        """
        rows, count = descriptor.num_tokens, descriptor.num_active_loras
        if descriptor.uniform:
            lengths = [1] * rows
        else:
            shortest = -(-rows // self._max_model_len)
            requests = min(max(count, shortest, 1), self._max_num_seqs, rows)
            lengths = _split(rows, requests)
        block_size = self._runner.buffers.block_size
        return Batch(
            tuple(
                BatchRow(
                    token_ids=[0] * length,
                    start=0,
                    block_ids=[PADDING_BLOCK] * -(-length // block_size),
                    lora_slot=index if index < count else NO_LORA,
                    samples=True,
                )
                for index, length in enumerate(lengths)
            )
        )


def _split(rows: int, requests: int) -> list[int]:
    """Deal rows evenly to requests, the shorter ones first."""
    return [(rows + index) // requests for index in range(requests)]
