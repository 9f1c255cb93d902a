"""`python -m transformer_jax` is the program `transformer-jax`."""

import sys

from transformer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
