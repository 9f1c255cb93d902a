"""Bytes that devices send, of programs small enough to count by hand."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from transformer_jax.collectives import Traffic, traffic

MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
X = jax.ShapeDtypeStruct((2 * 4 * 24, 5), jnp.float32)  # 24 x 5 on each of 8 devices
MINE = 24 * 5 * 4  # bytes


def sent(function: Callable) -> list[Traffic]:
    """Returns what is sent where each device runs `function` on its `[24, 5]`."""
    spec = PartitionSpec(("a", "b"))
    placed = jax.shard_map(
        function, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False
    )
    text = jax.jit(placed).lower(X).compile().as_text()
    assert text
    return traffic(text, 8)


def turns(count: int, body: Callable) -> Callable:
    """Returns a function that does `body` so many times, in a loop."""

    def function(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda y, _: (jnp.sin(body(y)), None), x, length=count)[0]

    return function


psum = functools.partial(jax.lax.psum, axis_name="b")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (psum, Traffic("all-reduce", 4, 1, 2 * 3 / 4 * MINE)),
        (
            lambda x: jax.lax.psum(x, ("a", "b")),
            Traffic("all-reduce", 8, 1, 2 * 7 / 8 * MINE),
        ),
        (
            lambda x: jax.lax.all_gather(x, "b", tiled=True),
            Traffic("all-gather", 4, 1, 3 * MINE),  # the three quarters of others
        ),
        (
            lambda x: jax.lax.psum_scatter(x, "b", tiled=True),
            Traffic("reduce-scatter", 4, 1, 3 / 4 * MINE),
        ),
        (
            lambda x: jax.lax.all_to_all(x, "b", 0, 0, tiled=True),
            Traffic("all-to-all", 4, 1, 3 / 4 * MINE),
        ),
        (turns(5, psum), Traffic("all-reduce", 4, 5, 5 * 2 * 3 / 4 * MINE)),
        (
            turns(3, turns(7, psum)),
            Traffic("all-reduce", 4, 21, 21 * 2 * 3 / 4 * MINE),
        ),
        (
            lambda x: psum(x.astype(jnp.int8)),
            Traffic("all-reduce", 4, 1, 2 * 3 / 4 * MINE / 4),
        ),
    ],
)
def test_one_kind(function: Callable, expected: Traffic) -> None:
    assert sent(function) == [expected]


def test_to_the_next_device() -> None:
    ring = [(i, (i + 1) % 4) for i in range(4)]
    (found,) = sent(lambda x: jax.lax.ppermute(x, "b", ring))
    assert (found.kind, found.count) == ("collective-permute", 1)
    assert found.bytes_sent == MINE


def test_the_largest_come_first_and_nothing_is_nothing() -> None:
    assert sent(jnp.sin) == []
    found = sent(lambda x: jax.lax.all_gather(x, "a", tiled=True) * psum(x).sum())
    assert [each.kind for each in found] == ["all-reduce", "all-gather"]


def test_a_loop_of_unknown_length_is_not_counted() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: psum(y) / 5, x)

    with pytest.raises(ValueError, match="cannot count this collective"):
        sent(function)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['a'=2,'b'=4,'c'=3] {'a','c'}", 6),
        ("replica_groups=mesh['a'=2,'b'=8] {'a','b':(1)4}", 8),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", 2),
        ("replica_groups={}", 12),
    ],
)
def test_how_groups_are_written(groups: str, devices: int) -> None:
    """As versions of the compiler do it."""
    start = (
        "ENTRY %main (x: f32[6]) -> f32[6] {\n  ROOT %y = f32[6]{0} all-reduce(%x), "
    )
    assert traffic(f"{start}{groups}, to_apply=%add\n}}", 12) == [
        Traffic("all-reduce", devices, 1, 2 * (devices - 1) / devices * 24)
    ]
    with pytest.raises(ValueError, match="cannot read the groups"):
        traffic(f"{start}replica_groups=other, to_apply=%add\n}}", 12)
