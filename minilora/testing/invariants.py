"""Checks of what must hold between steps, whatever the traffic was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from minilora.batch import NO_LORA, PADDING_BLOCK, Batch, GraphMode
from minilora.engine.request import Request
from minilora.graphs.dispatcher import GraphDispatcher, GraphKey
from minilora.lora.adapter import LoraWeights
from minilora.lora.layers import LoraEmbedding, LoraLayer
from minilora.lora.registry import AdapterVersion
from minilora.runner import ModelRunner
from minilora.testing.faults import Fault, FaultKind


def check_dispatch(key: GraphKey, batch: Batch) -> list[Fault]:
    """Whether the chosen graph has room for the step's rows and adapters."""
    chosen, real = key.descriptor, batch.num_real_loras
    wrong = []
    if chosen.num_tokens < batch.num_tokens:
        wrong.append(f"{chosen.num_tokens} rows for {batch.num_tokens}")
    if real and not chosen.has_lora:
        wrong.append(f"no LoRA for {real} adapters")
    elif chosen.num_active_loras < real:
        wrong.append(f"a grid of {chosen.num_active_loras} for {real} adapters")
    if key.mode is GraphMode.FULL and not batch.uniform:
        wrong.append("FULL for a step with prefills")
    return [Fault(FaultKind.WRONG_GRAPH, text) for text in wrong]


def check_keys(dispatcher: GraphDispatcher, max_loras: int, max_num_seqs: int) -> list[Fault]:
    """Whether every captured count of adapters can occur at its size."""
    full = [k.descriptor.num_tokens for k in dispatcher.keys if k.mode is GraphMode.FULL]
    covered, faults = max(full, default=0), []
    for key in dispatcher.keys:
        rows, count = key.descriptor.num_tokens, key.descriptor.num_active_loras
        # Where FULL takes the uniform steps, a step has a request with two rows or more.
        mixed = key.mode is GraphMode.PIECEWISE and covered >= min(rows, max_num_seqs)
        if count > min(max_loras, rows - mixed, max_num_seqs):
            limits = f"max_loras={max_loras}, max_num_seqs={max_num_seqs}"
            text = f"{count} adapters in {rows} rows, {key.mode.name} ({limits})"
            faults.append(Fault(FaultKind.UNREACHABLE_KEY, text))
    return faults


def is_lora_launch(node: str) -> bool:
    """Whether a name in `Graph.nodes` is one of the LoRA ops or kernels."""
    return "lora_" in node or node.startswith(("_shrink_kernel", "_expand_kernel"))


def check_launches(runner: ModelRunner, keys: Iterable[GraphKey]) -> list[Fault]:
    """Whether graphs with LoRA launch LoRA kernels, and those without do not."""
    faults = []
    for key in keys:
        launched = sum(is_lora_launch(node) for node in runner.nodes(key))
        if key.descriptor.has_lora and not launched:
            faults.append(Fault(FaultKind.NO_LORA_LAUNCHES, f"{key}"))
        if launched and not key.descriptor.has_lora:
            faults.append(Fault(FaultKind.NEEDLESS_LORA, f"{launched} launches in {key}"))
    return faults


def check_slots(
    layers: Sequence[LoraLayer], requests: Iterable[Request], batch: Batch
) -> list[Fault]:
    """Whether each row goes to its request's slot, which holds its adapter and nothing besides."""
    faults, holders = [], dict[tuple[int, str], AdapterVersion]()
    for request, row in zip(requests, batch.rows, strict=True):
        version = request.adapter
        slot = NO_LORA if version is None else version.slot
        if row.lora_slot != slot:
            text = f"a row of {_name(version)} goes to slot {row.lora_slot}, not {slot}"
            faults.append(Fault(FaultKind.WRONG_SLOT, text))
        if version is not None:
            holders[row.lora_slot, version.name] = version
    for (slot, _), version in holders.items():
        if version.adapter is not None:
            wrong = _wrong_layer(layers, slot, version.adapter.modules)
            if wrong is not None:
                text = f"slot {slot} in {wrong}, {_name(version)}"
                faults.append(Fault(FaultKind.WRONG_SLOT, text))
    return faults


def _name(version: AdapterVersion | None) -> str:
    return "the base model" if version is None else f"adapter {version.name!r}"


def check_blocks(running: Iterable[Request]) -> list[Fault]:
    """Whether every KV block has one owner, and the padding block none."""
    owned = Counter(block for request in running for block in request.block_ids)
    wrong = sorted(b for b, count in owned.items() if count > 1 or b == PADDING_BLOCK)
    return [Fault(FaultKind.SHARED_BLOCK, f"block {block}") for block in wrong]


def _wrong_layer(
    layers: Iterable[LoraLayer], slot: int, modules: Mapping[str, LoraWeights]
) -> str | None:
    for layer in layers:
        own_ranks = [modules[name].r for name in layer.names if name in modules]
        if int(layer.lora_ranks[slot]) != max(own_ranks, default=0):
            return f"{layer.names[0]} (its rank)"
        slices = zip(layer.names, layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        for name, a_stacked, b_stacked in slices:
            a, b = torch.zeros_like(a_stacked[slot]), torch.zeros_like(b_stacked[slot])
            if (weights := modules.get(name)) is not None:
                own = weights.a.T if isinstance(layer, LoraEmbedding) else weights.a
                a[tuple(slice(0, n) for n in own.shape)] = own.to(a)
                b[:, : weights.r] = (weights.b.float() * weights.scaling).to(b)
            if not torch.equal(a, a_stacked[slot]) or not torch.equal(b, b_stacked[slot]):
                return name
    return None
