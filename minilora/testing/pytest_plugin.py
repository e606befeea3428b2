"""Fixtures for tests of kernels and layers under graphs; pytest finds them once minilora is
installed.

`graph_backend` runs a test once for each backend of the machine, `poison` fills tensors and
engines with what must not matter, `parity` checks a function or an engine. Nothing of torch is
imported before a test asks for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from minilora.engine.llm import LLM
    from minilora.testing.parity import Factory, ParityReport
    from minilora.testing.replay import Tensors


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that use `graph_backend` or `parity` once for each backend of this machine."""
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize") if mark.args]
    if "graph_backend" in metafunc.fixturenames and not any("graph_backend" in a for a in own):
        import torch

        names = ["recorded", *(["cuda"] if torch.cuda.is_available() else [])]
        metafunc.parametrize("graph_backend", names, indirect=True)


@pytest.fixture
def graph_backend(request: pytest.FixtureRequest) -> str:
    """Name a graph backend: "recorded", and "cuda" where there is a GPU, a test run for each."""
    name: str = getattr(request, "param", "recorded")
    return name


@pytest.fixture
def poison() -> PoisonFixture:
    """Fill tensors, or an engine's steps; see `PoisonFixture`."""
    return PoisonFixture()


@pytest.fixture
def parity(graph_backend: str) -> ParityFixture:
    """Check functions and engines on one backend; see `ParityFixture`."""
    return ParityFixture(graph_backend)


class PoisonFixture:
    """What the `poison` fixture gives."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with NaN, or the largest value of its dtype, and return it."""
        from minilora.ops.scratch import poison_

        return poison_(tensor)

    def engine(self, llm: LLM, *what: str) -> Any:
        """Return `minilora.testing.poisoned` for an engine, a context manager."""
        from minilora.testing.poison import poisoned

        return poisoned(llm, *what)


class ParityFixture:
    """What the `parity` fixture gives.

    Attributes:
        backend: "recorded" or "cuda".
        device: where a test should put its tensors: "cpu" or "cuda".
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.device = "cuda" if backend == "cuda" else "cpu"

    def __call__(
        self,
        fn: Callable[[], Any],
        inputs: Tensors,
        steps: Iterable[Tensors],
        *,
        state: Tensors | None = None,
        scratch: Tensors | None = None,
        real_rows: Sequence[int] | None = None,
    ) -> int:
        """Check a function; see `minilora.testing.check_replay`."""
        from minilora.testing.replay import check_replay

        return check_replay(
            fn,
            inputs,
            steps,
            state=state,
            scratch=scratch,
            real_rows=real_rows,
            backend=self.backend,
        )

    def engine(self, make: Factory, **options: Any) -> ParityReport:
        """Check an engine on this backend's paths; see `minilora.testing.run_parity`.

        Raises:
            FaultFound: naming each fault.
        """
        from minilora.testing.parity import PATHS, run_parity

        paths = [name for name, keywords in PATHS.items() if keywords["graph"] == self.backend]
        report = run_parity(make, paths, **options)
        report.assert_ok()
        return report
