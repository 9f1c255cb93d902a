"""How activations are split over a mesh, in the names that parameters use, too."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax

# From logical axes to where an array lies; None where there is no mesh.
Placement = Callable[[tuple[str | None, ...]], jax.sharding.Sharding]
_placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar(
    "placement", default=None
)


@contextlib.contextmanager
def on_mesh(placement: Placement) -> Iterator[None]:
    """Lets `split` place what is traced within as `placement` says."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


def split(x: jax.Array, *axes: str | None) -> jax.Array:
    """Says which logical axis each axis of `x` is; None for one that is never split.

    It costs nothing and does nothing where there is no mesh.
    """
    placement = _placement.get()
    if placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, placement(axes))
