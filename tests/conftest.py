"""Made checkpoints and adapters that the tests share, and the devices they run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minilora.engine import startup
from minilora.testing import (
    make_signature_adapter,
    make_signature_llama,
    make_tiny_adapter,
    make_tiny_llama,
)


@pytest.fixture(scope="session", autouse=True)
def uncompiled() -> Iterator[None]:
    """Take compile="auto" for "none" on CUDA too: to compile tiny models of every shape takes
    longer than all tests. `test_compile.py` and `test_paths.py` ask for it by name.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "compiled", lambda config, _: config.compile == "inductor")
        yield


# As in `minilora.graphs.cuda`, for tests that profile on their own.
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
# Tiny matrices, and a test runs on every core: a second thread takes the other worker's.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device of this machine: a test with this fixture runs on each."""
    return str(request.param)


class SignatureZoo:
    """The signature checkpoint (F-SIG) and its adapters, made when they are first asked for.

    ``zoo("down-7")`` always answers 7; ``zoo("v-3")`` answers 3 and stamps the KV cache.
    """

    def __init__(self, folder: Path) -> None:
        self.model = make_signature_llama(folder / "model")
        self._folder = folder

    def __call__(self, name: str, rank: int = 2) -> str:
        kind, token = name.split("-")
        folder = self._folder / f"{name}-r{rank}"
        if not folder.exists():
            make_signature_adapter(folder, self.model, kind=kind, token=int(token), r=rank)
        return str(folder)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> SignatureZoo:
    """The signature checkpoint; ``zoo.model`` is its folder, ``zoo(name)`` an adapter's."""
    return SignatureZoo(tmp_path_factory.mktemp("signature"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama (F-PEFT)."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Callable[..., Path]:
    """Make (once) an adapter of `tiny_llama`: ``tiny_adapter("name", r=8, ...)``."""
    root = tmp_path_factory.mktemp("adapters")

    def make(name: str, **options: object) -> Path:
        folder = root / name
        if not folder.exists():
            make_tiny_adapter(folder, tiny_llama, **options)  # type: ignore[arg-type]
        return folder

    return make
