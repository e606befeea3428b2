"""What an `adapter_config.json` asks for, by PEFT's rules (read from PEFT 0.21).

A field that changes what the adapter computes is either understood or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minilora.config.checks import check_bool, check_int, check_number
from minilora.config.errors import AdapterError, ConfigError, shown
from minilora.lora.patterns import NameMatcher, Pattern

MAX_PATTERN_TEXT = 1 << 16  # characters in one field; a key for each module of a 405B has half
_EMBEDDINGS = ("model.embed_tokens", "lm_head")
_MAX_RANK = 1 << 16
_MAX_ALPHA = 1e6

_USED = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules"
    " layers_to_transform layers_pattern init_lora_weights bias".split()
)
_HARMLESS = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode"
    " lora_dropout merge_weights megatron_core qalora_group_size runtime_config"
    # only read where init_lora_weights asks for them
    " loftq_config eva_config corda_config lora_ga_config".split()
)
# Fields that change the maths where they are set.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias on B",
    "modules_to_save": "modules trained in full",
    "fan_in_fan_out": "transposed weights",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "repeated layers",
    "ensure_weight_tying": "an adapter shared by tied layers",
    "target_parameters": "LoRA on bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routing among adapters",
    "monteclora_config": "sampled weights",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "megatron_config": "Megatron layers",
}
# The other ways to initialise (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base weights too,
# so their A and B mean nothing on the weights of the checkpoint.
_PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of `adapter_config.json` that matter; names are those of PEFT's `LoraConfig`.

    Attributes:
        target_modules: endings of module names, a regex, "all-linear", or None where it is not
            said; then whatever the file holds is meant.
        unsupported: what the config asks for and minilora lacks, each with its field's name.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[Pattern, int] = field(default_factory=dict)
    alpha_pattern: Mapping[Pattern, float] = field(default_factory=dict)
    target_modules: frozenset[str] | Pattern | str | None = None
    exclude_modules: frozenset[str] | Pattern = frozenset()
    layers_to_transform: frozenset[int] = frozenset()
    layers_pattern: Sequence[Pattern] = ()
    unsupported: Sequence[str] = ()
    _matcher: NameMatcher = field(default_factory=NameMatcher, repr=False, compare=False)
    _found: dict[tuple[str, str], float] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> AdapterConfig:
        """Check the content of an `adapter_config.json`.

        Raises:
            AdapterError, ConfigError: a field is missing, of the wrong type or out of range.
                What is merely not supported is listed in `unsupported` and not raised.
        """
        kind = config.get("peft_type")
        if kind != "LORA":
            raise AdapterError(f"peft_type={shown(kind)} is not supported; minilora serves 'LORA'")
        for name in ("r", "lora_alpha"):
            if name not in config:
                raise AdapterError(f"{name} is missing")
        targets = _modules(config, "target_modules")
        return cls(
            r=_rank("r", config["r"]),
            lora_alpha=_alpha("lora_alpha", config["lora_alpha"]),
            use_rslora=check_bool("", "use_rslora", config.get("use_rslora") or False),
            rank_pattern=_pattern_values(config, "rank_pattern", _rank),
            alpha_pattern=_pattern_values(config, "alpha_pattern", _alpha),
            target_modules=targets,
            exclude_modules=_modules(config, "exclude_modules") or frozenset(),
            unsupported=_unsupported(config),
            **_layers(config, targets),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module: that of the first key of `rank_pattern` that fits, or r."""
        return int(self._first_fit("rank_pattern", module, self.r))

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module: as for `rank_of`."""
        return float(self._first_fit("alpha_pattern", module, self.lora_alpha))

    def scaling_of(self, module: str) -> float:
        """Return what B·A is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA, 2312.03732)."""
        r = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(r) if self.use_rslora else r)

    def targets(self, module: str) -> bool:
        """Whether PEFT would put an adapter on the module (its full name in transformers)."""
        if self._in(self.exclude_modules, module):
            return False
        targets = self.target_modules
        if isinstance(targets, str):  # "all-linear"
            return module not in _EMBEDDINGS
        if targets is not None and not self._in(targets, module):
            return False
        named_in_full = isinstance(targets, frozenset) and module in targets
        return named_in_full or not self.layers_to_transform or self._layer_is_meant(module)

    def _layer_is_meant(self, module: str) -> bool:
        parts = module.split(".")
        if parts[:2] != ["model", "layers"]:
            return False
        at = len("model.layers")
        fits = (self._matcher.matches_tail(p, module, end=at) for p in self.layers_pattern)
        return int(parts[2]) in self.layers_to_transform and (not self.layers_pattern or any(fits))

    def _in(self, modules: frozenset[str] | Pattern, module: str) -> bool:
        if isinstance(modules, Pattern):
            return self._matcher.fullmatch(modules, module)
        parts = module.split(".")
        return any(".".join(parts[i:]) in modules for i in range(len(parts)))

    def _first_fit(self, name: str, module: str, default: float) -> float:
        if (name, module) not in self._found:
            values: Mapping[Pattern, float] = getattr(self, name)
            fits = (v for key, v in values.items() if self._matcher.matches_tail(key, module))
            self._found[name, module] = next(fits, default)
        return self._found[name, module]


def _rank(name: str, value: Any) -> int:
    return check_int("", name, value, 1, _MAX_RANK)


def _alpha(name: str, value: Any) -> float:
    return check_number("", name, value, -_MAX_ALPHA, _MAX_ALPHA)


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name[:60]}={shown(value)} ({_UNSUPPORTED.get(name, 'unknown to minilora')})"
        for name, value in config.items()
        if name not in _USED and name not in _HARMLESS and value not in (None, False, "", [], {})
    ]
    init = config.get("init_lora_weights")
    known = isinstance(init, str) and init.lower() in _PLAIN_INITS
    if not (init is None or isinstance(init, bool) or known):
        found.append(f"init_lora_weights={shown(init)} (changes the base weights)")
    bias = config.get("bias")
    if bias not in (None, "none"):
        found.append(f"bias={shown(bias)} (trained biases)")
    return found


def _pattern(name: str, source: Any) -> Pattern:
    if not isinstance(source, str):
        raise ConfigError(f"{name} must hold texts, not {shown(source)}")
    try:
        return Pattern(source)
    except AdapterError as error:
        raise AdapterError(f"{name}: {error}") from None


def _pattern_values(config: Mapping[str, Any], name: str, check: Any) -> dict[Pattern, Any]:
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={shown(given)} must be an object from module names to numbers")
    _check_amount(name, given)
    return {_pattern(name, key): check(f"{name}[{key!r}]", value) for key, value in given.items()}


def _check_amount(name: str, patterns: Iterable[Any]) -> None:
    length = sum(len(pattern) for pattern in patterns if isinstance(pattern, str))
    if length > MAX_PATTERN_TEXT:
        raise ConfigError(
            f"{name} has {length} characters of patterns; at most {MAX_PATTERN_TEXT} are matched"
        )


def _modules(config: Mapping[str, Any], name: str) -> Any:
    """Return names as a set, a regex as a `Pattern`, "all-linear" as itself, nothing as None."""
    given = config.get(name)
    if given is None:
        return None
    if isinstance(given, str):
        all_linear = name == "target_modules" and given.lower() == "all-linear"
        return "all-linear" if all_linear else _pattern(name, given)
    if not isinstance(given, list) or not all(isinstance(x, str) for x in given):
        raise ConfigError(f"{name}={shown(given)} must be a list of module names or a regex")
    return frozenset(given)


def _layers(config: Mapping[str, Any], targets: Any) -> dict[str, Any]:
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or []
    layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    patterns = patterns if isinstance(patterns, list) else [patterns]
    for name, given in (("layers_to_transform", layers), ("layers_pattern", patterns)):
        if given and isinstance(targets, (str, Pattern)):
            raise ConfigError(f"{name} needs target_modules to be a list, as in PEFT")
    _check_amount("layers_pattern", patterns)
    if patterns and not layers:
        raise ConfigError("layers_pattern needs layers_to_transform, as in PEFT")
    if any(isinstance(pattern, str) and "|" in pattern for pattern in patterns):
        raise ConfigError(f"layers_pattern={shown(patterns)} must be a list instead of using '|'")
    return {
        "layers_to_transform": frozenset(
            check_int("", "layers_to_transform", layer, 0, 1 << 20) for layer in layers
        ),
        "layers_pattern": [_pattern("layers_pattern", pattern) for pattern in patterns],
    }
