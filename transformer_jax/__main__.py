"""`python -m transformer_jax` is the program `transformer-jax`."""

from transformer_jax.cli import program

if __name__ == "__main__":
    program()
