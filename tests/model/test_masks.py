"""Masks: their whole truth tables."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.model.masks import (
    cache_mask,
    causal_mask,
    padding_mask,
    segment_mask,
)


def as_text(mask: jax.Array) -> list[str]:
    """Writes each row of the last axis as 1s and 0s; checks that they are booleans."""
    assert mask.dtype == jnp.bool_
    flat = np.asarray(mask).reshape(-1, mask.shape[-1])
    return ["".join(str(int(seen)) for seen in row) for row in flat]


def test_padding_mask_sees_the_first_tokens_of_each_row() -> None:
    mask = padding_mask(jnp.asarray([0, 1, 3, 4]), 4)
    assert mask.shape == (4, 1, 4)
    assert as_text(mask) == ["0000", "1000", "1110", "1111"]


def test_causal_mask_sees_itself_and_what_came_before() -> None:
    mask = causal_mask(4)
    assert mask.shape == (1, 4, 4)
    assert as_text(mask) == ["1000", "1100", "1110", "1111"]


def test_cache_mask_is_the_row_of_the_causal_mask() -> None:
    slots = jnp.zeros((1, 1, 4), jnp.int32)
    masks = [cache_mask(jnp.asarray(index), slots) for index in range(4)]
    assert all(mask.shape == (1, 1, 4) for mask in masks)
    rows = [as_text(mask)[0] for mask in masks]
    assert rows == ["1000", "1100", "1110", "1111"] == as_text(causal_mask(4))


def test_cache_mask_sees_one_beam_of_each_position() -> None:
    slots = jnp.asarray([[[0, 1, 0], [1, 1, 1]]])
    mask = cache_mask(jnp.asarray(1), slots)  # the third position is not there yet
    assert mask.shape == (1, 2, 6)
    assert as_text(mask) == ["100100", "010100"]


def test_masks_combine_by_and() -> None:
    mask = causal_mask(3) & padding_mask(jnp.asarray([2, 3]), 3)
    assert mask.shape == (2, 3, 3)
    assert as_text(mask) == ["100", "110", "110", "100", "110", "111"]


def test_segment_mask_sees_the_same_segment_only() -> None:
    queries, keys = jnp.asarray([[1, 1, 2], [1, 0, 0]]), jnp.asarray([[1, 2, 2, 0]] * 2)
    mask = segment_mask(queries, keys)
    assert mask.shape == (2, 3, 4)
    assert as_text(mask) == ["1000", "1000", "0110", "1000", "0001", "0001"]
