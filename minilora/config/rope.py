"""`RopeConfig`: the rotary embedding that a `config.json` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minilora.config.checks import check_int, check_number
from minilora.config.errors import ConfigError, shown

_WHERE = "config.json: "
_KINDS = ("default", "linear", "llama3")
_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) and its scaling.

    Attributes:
        kind: "default", "linear" (positions divided by `factor`), or "llama3" (Llama 3.1:
            long wavelengths are stretched by `factor`, short ones kept, those between blended).
        theta: the base of the frequencies.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises:
            ConfigError: a kind of scaling that minilora lacks, or a field that is missing,
                unknown or out of range; it is named.
        """
        fields = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
        ropes = [cls._from_field(name, config) for name in fields or ["rope_scaling"]]
        if ropes[0] != ropes[-1]:  # readers differ in which of the two they take
            raise ConfigError(
                f"{_WHERE}rope_scaling={shown(config['rope_scaling'])} disagrees with "
                f"rope_parameters={shown(config['rope_parameters'])}; remove one of them"
            )
        return ropes[0]

    @classmethod
    def _from_field(cls, field: str, config: Mapping[str, Any]) -> RopeConfig:
        given = config.get(field) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{_WHERE}{field}={shown(given)} must be an object")
        scaling = dict(given)
        kind = scaling.pop("rope_type", scaling.pop("type", "default"))
        scaling.pop("type", None)
        if kind not in _KINDS:
            raise ConfigError(
                f"{_WHERE}{field} has rope_type={shown(kind)}; minilora runs {', '.join(_KINDS)}"
            )
        theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
        return cls(
            kind,
            check_number(f"{_WHERE}", "rope_theta", theta, 1.0, 1e12),
            **_scaling_fields(field, kind, scaling),
        )


def _scaling_fields(field: str, kind: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Check the fields of one kind of scaling; every field that is not of it is refused."""
    if scaling.get("partial_rotary_factor") == 1.0:
        del scaling["partial_rotary_factor"]
    unknown = {key for key, value in scaling.items() if value is not None} - _KEYS[kind]
    missing = _KEYS[kind] - set(scaling)
    for problem, names in (("unknown to", unknown), ("missing for", missing)):
        if names:
            raise ConfigError(
                f"{_WHERE}{field}.{shown(min(names))[1:-1]} is {problem} rope_type={kind!r}"
            )
    checked: dict[str, Any] = {}
    for key in sorted(_KEYS[kind]):
        if key == "original_max_position_embeddings":
            checked[key] = check_int(f"{_WHERE}{field}.", key, scaling[key], 1, 1 << 24)
        else:
            checked[key] = check_number(f"{_WHERE}{field}.", key, scaling[key], 1e-3, 1e6)
    if kind == "llama3" and not checked["low_freq_factor"] < checked["high_freq_factor"]:
        raise ConfigError(
            f"{_WHERE}{field}.low_freq_factor={checked['low_freq_factor']!r} must be less than "
            f"high_freq_factor={checked['high_freq_factor']!r}"
        )
    return checked
