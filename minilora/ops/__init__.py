"""What runs on the device: tensors (`KernelMeta` holds some) and ints in, nothing else is read."""

from minilora.ops.expand import lora_expand
from minilora.ops.kernel_meta import NO_LORA, KernelMeta
from minilora.ops.shrink import lora_shrink

__all__ = ["NO_LORA", "KernelMeta", "lora_expand", "lora_shrink"]
