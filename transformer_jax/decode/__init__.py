"""Search over any step function, and the translator built on it."""
