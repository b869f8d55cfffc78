"""Tests of numpy arrays whose elements are of types that other packages define."""

import numpy as np
import pytest

import ringtrain as ring
from ranks import raised, run_in_threads


@pytest.mark.parametrize("name", ("float8_e4m3b11fnuz", "int1"))
def test_types_with_the_codes_of_other_types_are_refused(name: str):
    """The first type has the character code of uint64, and the second that of float16. As arrays of these types, the operations
    would read and write memory beyond the array."""
    types = pytest.importorskip("ml_dtypes", reason="NOT TESTED: types of ml_dtypes, which cannot be imported")
    if not hasattr(types, name):
        pytest.skip(f"NOT TESTED: {name}, which this version of ml_dtypes does not have")

    def work(group: ring.Group) -> None:
        memory = np.ones(3 * 64, np.uint8)
        x = memory[64:128].view(getattr(types, name))
        raised(ring.Unsupported, group.all_reduce, x, out=x)
        raised(ring.Unsupported, group.all_reduce, x)
        raised(ring.InvalidArgument, group.send, x, 1 - group.rank)
        raised(ring.InvalidArgument, group.receive, x)
        group.barrier()
        assert memory.tolist() == [1] * len(memory)

    assert run_in_threads(2, work) == [None, None]
