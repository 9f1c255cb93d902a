"""Looks into what a function computes, and in which types."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of a jaxpr, those of inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def types(jaxpr: Any, primitive: str) -> set[Any]:
    """Returns the types that a primitive is given."""
    found = [e for e in equations(jaxpr) if e.primitive.name == primitive]
    assert found, f"no {primitive} in the jaxpr"
    return {v.aval.dtype for e in found for v in e.invars if hasattr(v, "aval")}
