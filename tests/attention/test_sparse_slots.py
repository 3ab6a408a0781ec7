"""Slots of keys while decoding: whatever a later query may see is kept, in one place, until it is read."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_patterns import PATTERNS

from jaxformer.attention.sparse_slots import find_regions

# Of one shape for all examples, so that what JAX compiles of `slot` serves them all.
POSITIONS = jnp.arange(400, dtype=jnp.int32)[None]


def taken_again(slots, size):
    """For each position, the next that takes its slot, or infinity: a loop backwards over them."""
    taker, next_taker = {}, np.full(len(slots), np.inf)
    for position in range(len(slots) - 1, -1, -1):
        if slots[position] < size:
            next_taker[position] = taker.get(slots[position], np.inf)
            taker[slots[position]] = position
    return next_taker


@settings(max_examples=60, deadline=None)
@given(PATTERNS, st.integers(1, 200))
def test_what_a_later_query_sees_is_in_exactly_one_slot(pattern, max_length):
    pattern = pattern()
    regions = find_regions(pattern, max_length)
    endless = all(region.endless for region in regions)
    # Endless slots serve any number of tokens.
    length = 2 * max_length if endless else max_length
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    found = np.zeros((length, length), int)
    for region in regions:
        slots = np.asarray(region.slot(POSITIONS))[0, :length]
        assert (slots >= 0).all()
        next_taker = taken_again(slots, region.size)
        assert region.ring or np.isinf(next_taker).all()
        kept = (slots < region.size)[None] & (key <= query) & (query < next_taker[None])
        found += kept & region.pattern.mask(length)
    np.testing.assert_array_equal(found, pattern.mask(length) & np.tri(length, dtype=bool))
    assert endless or sum(region.size for region in regions) <= max_length
