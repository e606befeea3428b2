"""Which adapter does it: reading adapters, keeping them in slots, and the layers that use them."""
