import math

import numpy as np
import pytest

from beamline.policy.positions import position_tables


def test_the_tables_are_the_written_formulas() -> None:
    """Angles reach 2000, where float32 is 1e-4 apart; up to 50 it is 4e-6."""
    cos, sin, stretch = position_tables(8, 100.0, 2100)
    for p in (0, 1, 7, 50):
        angles = [p / 100 ** (2 * i / 8) for i in range(4)]
        np.testing.assert_allclose(cos[p], np.cos(angles), atol=1e-5)
        np.testing.assert_allclose(sin[p], np.sin(angles), atol=1e-5)
    for p in (0, 2047, 2099):
        assert stretch[p] == pytest.approx(math.exp(0.1 * math.log1p((p + 1) / 2048)), rel=1e-6)


@pytest.mark.parametrize("positions", [1, 37, 1023, 1024, 1025, 2500])
def test_a_table_is_the_beginning_of_a_longer_one(positions: int) -> None:
    for short, long in zip(position_tables(10, 1e4, positions), position_tables(10, 1e4, 3000), strict=True):
        assert len(short) == positions
        np.testing.assert_array_equal(short, long[:positions])
