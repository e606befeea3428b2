"""`KernelMeta`: the routing tables that tell the LoRA ops which rows belong to which adapter.

The running example: a decode batch of three rows, adapter A in slot 2, no adapter, adapter B
in slot 0, padded to four rows; `max_loras` is 4.

    token_lora_mapping               [2, -1, 0, -1]     the slot of each row, -1: none
    token_indices_sorted_by_lora_ids [2, 0, 1, 3]       rows of slot 0, of slot 2, then the rest
    active_lora_ids                  [0, 2, -1, -1]     the group's slot
    num_tokens_per_lora              [1, 1, 0, 0]       the group's rows
    lora_token_start_loc             [0, 1, 2, 2, 2]    where they start in the sorted rows

``-1`` is never a group: groups are real adapters, and come first. So the number of adapters
means the same to the scheduler, the dispatcher, the metadata and the kernels. (vLLM lists the
``-1`` rows as a group of their own but does not count it in the key of a graph, and so drops
the last adapter of some mixed batches.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minilora.ops.packed import PackedInts

NO_LORA = -1


class KernelMeta:
    """Routing tables of one step at fixed addresses (names as in vLLM, an "id" is a slot).

    Attributes:
        token_lora_mapping: int32 ``[T]``, the slot of each (padded) row or -1.
        token_indices_sorted_by_lora_ids: int32 ``[T]``, rows sorted by slot, -1 rows last.
        active_lora_ids: int32 ``[max_loras]``, slots with rows, ascending, then -1.
        num_tokens_per_lora: int32 ``[max_loras]``, rows of each group, then 0.
        lora_token_start_loc: int32 ``[max_loras + 1]``, where each group starts.

    Args:
        max_tokens: the most rows a step can have, padding included.
        max_loras: adapter slots.
        packed: fields of a larger buffer to live in (see `sizes`); its owner uploads.
        prefix: of the field names in `packed`.

    Examples:
        >>> meta = KernelMeta(max_tokens=4, max_loras=4)
        >>> meta.prepare([2, -1, 0], num_tokens_padded=4, num_active_loras=2)
        >>> meta.active_lora_ids.tolist(), meta.token_indices_sorted_by_lora_ids.tolist()
        ([0, 2, -1, -1], [2, 0, 1, 3])
    """

    def __init__(
        self,
        max_tokens: int,
        max_loras: int,
        device: torch.device | str = "cpu",
        *,
        packed: PackedInts | None = None,
        prefix: str = "",
    ) -> None:
        self.max_tokens, self.max_loras = max_tokens, max_loras
        sizes = self.sizes(max_tokens, max_loras, prefix)
        self._owned = PackedInts(sizes, device) if packed is None else None
        fields = self._owned or packed
        assert fields is not None
        host = [fields.host[name] for name in sizes]
        self._mapping, self._order, self._active, self._counts, self._starts = host
        self._full = [fields.device[name] for name in sizes]
        self._rows = np.arange(max_tokens, dtype=np.int32)
        self.active_lora_ids, self.num_tokens_per_lora, self.lora_token_start_loc = self._full[2:]
        self._shown = -1
        self._show(max_tokens)
        self.reset()

    @staticmethod
    def sizes(max_tokens: int, max_loras: int, prefix: str = "") -> dict[str, int]:
        """Return the length of each field, for a `PackedInts` that holds more than this."""
        return {
            f"{prefix}token_lora_mapping": max_tokens,
            f"{prefix}token_indices_sorted_by_lora_ids": max_tokens,
            f"{prefix}active_lora_ids": max_loras,
            f"{prefix}num_tokens_per_lora": max_loras,
            f"{prefix}lora_token_start_loc": max_loras + 1,
        }

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mapping, sorted rows, groups' slots and groups' sizes, in the order the ops take them."""
        return (
            self.token_lora_mapping,
            self.token_indices_sorted_by_lora_ids,
            self.active_lora_ids,
            self.num_tokens_per_lora,
        )

    def prepare(
        self,
        token_lora_mapping: Sequence[int] | npt.NDArray[np.integer],
        num_tokens_padded: int,
        num_active_loras: int,
    ) -> None:
        """Write every table for one step and upload them in one copy; see `write`."""
        self.write(token_lora_mapping, num_tokens_padded, num_active_loras)
        self._upload()

    def write(
        self,
        token_lora_mapping: Sequence[int] | npt.NDArray[np.integer],
        num_tokens_padded: int,
        num_active_loras: int,
    ) -> int:
        """Write every table on the host; the owner of the packed buffer uploads.

        Args:
            token_lora_mapping: the slot of each real row, or -1.
            num_tokens_padded: rows of the step with padding (padding belongs to no adapter).
            num_active_loras: the groups that the grid will have; at least the real number.

        Returns:
            The real number of groups.

        Raises:
            ValueError: more rows than the buffer, a slot out of range, or a grid too small
                for the adapters in the mapping (it would drop the last of them silently).
        """
        given = np.asarray(token_lora_mapping)
        self._check(given, num_tokens_padded, num_active_loras)
        mapping = given.astype(np.int16)  # checked first: a larger slot would wrap to another
        n = len(mapping)
        self._mapping[:n] = mapping
        self._mapping[n:] = NO_LORA
        self._order[:] = self._rows
        # The sort key of -1 is max_loras: those rows come last and are in no group.
        keys = np.where(mapping < 0, self.max_loras, mapping).astype(np.int16)
        self._order[:n] = keys.argsort(kind="stable")
        groups = self._write_groups(np.bincount(keys, minlength=self.max_loras + 1)[:-1])
        if groups > num_active_loras:
            raise ValueError(
                f"num_active_loras={num_active_loras} is less than the {groups} adapters of the "
                "step; the grid would drop rows"
            )
        self._show(num_tokens_padded)
        return groups

    def reset(self) -> None:
        """Forget the last step: every row without adapter, no group; uploads if it can."""
        self._mapping[:] = NO_LORA
        self._order[:] = self._rows
        self._write_groups(np.zeros(self.max_loras, dtype=np.int32))
        self._upload()

    def _write_groups(self, rows_of_slot: npt.NDArray[np.integer]) -> int:
        slots = rows_of_slot.nonzero()[0]
        groups = len(slots)
        self._active[:groups] = slots
        self._active[groups:] = NO_LORA
        self._counts[:groups] = rows_of_slot[slots]
        self._counts[groups:] = 0
        self._starts[0] = 0
        self._counts.cumsum(out=self._starts[1:])
        return groups

    def _upload(self) -> None:
        if self._owned is not None:
            self._owned.upload()

    def _show(self, num_tokens: int) -> None:
        """Let the tables by row show the rows of this step only; the addresses stay."""
        if num_tokens == self._shown:
            return
        self._shown = num_tokens
        self.token_lora_mapping = self._full[0][:num_tokens]
        self.token_indices_sorted_by_lora_ids = self._full[1][:num_tokens]

    def _check(
        self, mapping: npt.NDArray[Any], num_tokens_padded: int, num_active_loras: int
    ) -> None:
        if not len(mapping) <= num_tokens_padded <= self.max_tokens:
            raise ValueError(
                f"num_tokens_padded={num_tokens_padded} must be from {len(mapping)} (the rows "
                f"given) to {self.max_tokens} (the rows of the buffer)"
            )
        if not 0 <= num_active_loras <= self.max_loras:
            raise ValueError(
                f"num_active_loras={num_active_loras} must be from 0 to max_loras={self.max_loras}"
            )
        if len(mapping) and mapping.dtype.kind not in "iu":
            raise ValueError(
                f"token_lora_mapping has the dtype {mapping.dtype}; slots are integers"
            )
        if len(mapping) and not NO_LORA <= mapping.min() <= mapping.max() < self.max_loras:
            raise ValueError(
                f"token_lora_mapping holds slots from {mapping.min()} to {mapping.max()}; they "
                f"must be from {NO_LORA} to {self.max_loras - 1}"
            )
