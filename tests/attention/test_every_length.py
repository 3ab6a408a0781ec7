"""The full sweep: every kind at every length up to 33, with and without padding, against its oracle."""

import numpy as np
import pytest
from test_contract import ROWS, Setting, close, expected, usual

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length", range(1, 34))
@pytest.mark.parametrize("name", list(ROWS))
def test_values_equal_the_oracle(name, length):
    row = ROWS[name]
    variant, causal = usual(name)
    setting = Setting(name, seed=length, causal=causal, queries=length, keys=length)
    for key_mask in (setting.all_keys, setting.key_mask):
        want, _, _ = expected(name, variant, setting.inputs, key_mask, causal, setting.d_output)
        got = setting.forward(variant, causal=causal, key_mask=key_mask)
        assert np.isfinite(got).all()
        close(got, want, row)
