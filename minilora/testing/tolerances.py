"""The one place of tolerances: how far logits may be from the oracle's."""
from __future__ import annotations
