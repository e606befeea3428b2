"""Where a measurement is from: what every result file says first."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch


def provenance(
    device: str, command: str, unit: str, packages: Sequence[str] = ()
) -> dict[str, str]:
    """Return machine, versions, date, command and unit of a result.

    Args:
        device: the option that was measured with, `"cpu"`, `"cuda"` or `"auto"`.
        command: what makes the figures again.
        unit: what one figure is, and of how many samples.
        packages: distributions to name beside torch and triton, such as a peer's.
    """
    return {
        "machine": machine(device),
        "versions": versions(packages),
        "date": datetime.date.today().isoformat(),
        "command": command,
        "unit": unit,
    }


def machine(device: str) -> str:
    """Return the hardware behind the option `device`: the GPU, or the CPU and its threads."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_cpu()}, {torch.get_num_threads()} threads"


def versions(packages: Sequence[str] = ()) -> str:
    """Return the versions of torch, triton, `packages`, Python and driver, as there are."""
    named = [f"torch {torch.__version__}"]
    for package in ("triton", *packages):
        try:
            named.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*named, f"Python {platform.python_version()}", *_driver()])


def _driver() -> list[str]:
    """Return the NVIDIA driver, in a list that is empty without one."""
    info = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module.*?(\d+\.[\d.]+)", info.read_text()) if info.is_file() else None
    return [f"driver {found[1]}"] if found else []


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or "CPU"
