"""The Transformer as functional Flax modules, and the masks it needs."""
