"""`run_parity`: every path a step can take, over named traffic, checked bit for bit.

A *path* is how steps run: eagerly, or from graphs of one backend in one mode. Within a path,
replay must equal eager execution of the same padded step bit for bit. Across paths, and against
the oracle, logits agree within the one table of tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minilora.config.errors import ConfigError, known_names
from minilora.engine.llm import LLM
from minilora.engine.request import Request
from minilora.testing.checker import StepChecker
from minilora.testing.faults import Fault, FaultFound, FaultKind
from minilora.testing.oracle import Oracle
from minilora.testing.tolerances import LOGIT_TOLERANCE, relative_error
from minilora.testing.traffic import TRAFFIC, Adapters, Traffic

PATHS: Mapping[str, Mapping[str, str]] = {
    "eager": {"graph": "none"},
    "recorded FULL": {"graph": "recorded", "graph_mode": "full"},
    "recorded PIECEWISE": {"graph": "recorded", "graph_mode": "piecewise"},
    "recorded both": {"graph": "recorded", "graph_mode": "full_and_piecewise"},
    "CUDA FULL": {"graph": "cuda", "graph_mode": "full"},
    "CUDA PIECEWISE": {"graph": "cuda", "graph_mode": "piecewise"},
    "CUDA both": {"graph": "cuda", "graph_mode": "full_and_piecewise"},
}
Factory = Callable[..., LLM]


def available_paths(device: str = "auto") -> list[str]:
    """Return the names of `PATHS` that this machine can run, with the engine's option `device`."""
    cuda = device != "cpu" and torch.cuda.is_available()
    return [name for name in PATHS if cuda or "CUDA" not in name]


@dataclass
class ParityRow:
    """One path over one traffic.

    Attributes:
        path: a name of `PATHS`, or "as given".
        workload: a name of `TRAFFIC`.
        steps: steps that ran.
        replays: those that had a graph.
        eager_error: the largest difference of a replay from eager execution; 0.0 is bit-equal.
        oracle_error: the largest error against the oracle, in units of a row's range; None
            where no oracle was asked for.
        faults: what was found; replay not being bit-equal to eager is a fault.
    """

    path: str
    workload: str
    steps: int = 0
    replays: int = 0
    eager_error: float = 0.0
    oracle_error: float | None = None
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.faults


@dataclass
class ParityReport:
    """The rows of `run_parity`."""

    rows: list[ParityRow] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every row is, and there is one."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def faults(self) -> list[Fault]:
        """The faults of all rows."""
        return [fault for row in self.rows for fault in row.faults]

    def assert_ok(self) -> None:
        """Raise `FaultFound` with every fault, or if there was nothing to check."""
        if self.faults:
            raise FaultFound(self.faults)
        assert self.rows, "run_parity checked nothing: no path or no workload"

    def __str__(self) -> str:
        """Return a table as text."""
        lines = [f"{'path':20} {'workload':12} {'steps':>6} {'replays':>8} {'oracle':>9}  verdict"]
        for row in self.rows:
            oracle = "-" if row.oracle_error is None else f"{row.oracle_error:.1e}"
            verdict = "right" if row.ok else str(row.faults[0])
            counts = f"{row.steps:6} {row.replays:8}"
            lines.append(f"{row.path:20} {row.workload:12} {counts} {oracle:>9}  {verdict}")
        return "\n".join(lines)


def run_parity(
    llm_or_factory: LLM | Factory,
    paths: Iterable[str] | None = None,
    workloads: Iterable[str] | None = None,
    *,
    adapters: Adapters | None = None,
    oracle: bool = True,
    thorough: bool = True,
    on_row: Callable[[ParityRow], None] | None = None,
) -> ParityReport:
    """Run traffic over paths and check every step; see `StepChecker` for what is checked.

    Args:
        llm_or_factory: an engine, or a function that makes one from the keywords of a path:
            ``lambda **options: LLM(folder, enable_lora=True, **options)``.
        paths: names of `PATHS`; None means all that this machine can run. An engine that was
            given is its own path.
        workloads: names of `TRAFFIC`; None means all.
        adapters: name -> folder of the adapters to serve.
        oracle: compare every row of logits with `Oracle` too.
        thorough: replay each step repeatedly, once with everything else poisoned.
            Steps are checked one by one, so none is launched ahead (`async_scheduling`); `fuzz`
            checks the tokens of an engine that does.
        on_row: called with each row when it is done.

    Raises:
        ConfigError: an unknown path or workload.
    """
    names = list(TRAFFIC if workloads is None else workloads)
    _refuse_unknown("workload", names, TRAFFIC)
    report = ParityReport()
    for path, make in _engines(llm_or_factory, paths):
        llm = make()
        judge = _Judge(llm) if oracle else None
        for name in names:
            row = _run(llm, ParityRow(path, name), TRAFFIC[name], adapters or {}, judge, thorough)
            report.rows.append(row)
            if on_row is not None:
                on_row(row)
    return report


def _engines(
    given: LLM | Factory, paths: Iterable[str] | None
) -> Iterable[tuple[str, Callable[[], LLM]]]:
    if isinstance(given, LLM):
        return [("as given", lambda: given)]
    names = list(available_paths() if paths is None else paths)
    _refuse_unknown("path", names, PATHS)
    return [(name, lambda name=name: given(**PATHS[name])) for name in names]  # type: ignore[misc]


def _refuse_unknown(what: str, names: Iterable[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; known here: {known_names(known)}")


def _run(
    llm: LLM,
    row: ParityRow,
    traffic: Traffic,
    adapters: Adapters,
    judge: _Judge | None,
    thorough: bool,
) -> ParityRow:
    with StepChecker(llm, thorough) as checker:
        traffic(llm, adapters)
    row.steps, row.replays = checker.num_steps, checker.num_replays
    row.eager_error, row.faults = checker.eager_error, checker.faults
    if llm.runner.backend is not None and row.steps and not row.replays:
        row.faults.append(Fault(FaultKind.NOTHING_REPLAYED, f"of {row.steps} in {row.path}"))
    if judge is not None:
        row.oracle_error, faults = judge.compare(checker.logits)
        row.faults += faults
    return row


class _Judge:
    """Compares the logits of finished requests with the oracle's."""

    def __init__(self, llm: LLM) -> None:
        self._oracle = Oracle(llm.config.model)
        self._tolerance = LOGIT_TOLERANCE[llm.kv_cache.tensor.dtype]

    def compare(
        self, kept: Mapping[Request, list[tuple[int, torch.Tensor]]]
    ) -> tuple[float, list[Fault]]:
        worst, faults = 0.0, list[Fault]()
        for request, rows in kept.items():
            tokens = [*request.prompt_token_ids, *request.output_token_ids]
            adapter = None if request.adapter is None else request.adapter.path
            lengths = [length for length, _ in rows]
            want = self._oracle.logits(tokens[: max(lengths)], adapter)
            want = want[[length - 1 for length in lengths]]
            errors = relative_error(torch.stack([row for _, row in rows]), want).amax(-1)
            error = float(torch.where(errors.isnan(), torch.inf, errors).max())
            worst = max(worst, error)
            if error > self._tolerance:
                by = f"adapter {request.adapter.name!r}" if request.adapter else "the base model"
                text = f"{error:.2g} of the range (allowed {self._tolerance:g}) for {by}"
                faults.append(Fault(FaultKind.WRONG_LOGITS, text))
        return worst, faults[:5]
