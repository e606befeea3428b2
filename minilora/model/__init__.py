"""The Llama: its maths, its KV cache, and how its weights are loaded."""
