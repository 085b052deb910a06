"""For tests of kernels in Triton's interpreter: skip them where kernels are compiled, and ignore what the interpreter warns of."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from megabatch.tiles.fused import architectures

if not architectures.INTERPRETED:
    pytest.skip("kernels are compiled here, and tests on the GPU run them", allow_module_level=True)

IN_INTERPRETER = [
    # Arithmetic is tested with scales that are useless for training.
    pytest.mark.filterwarnings("ignore:scale="),
    pytest.mark.usefixtures("unwritten_memory_is_no_number"),
    # The interpreter warns when numpy overflows or makes NaN, in values that the kernels discard.
    pytest.mark.filterwarnings(
        r"ignore:(overflow|divide by zero|invalid value) encountered in:RuntimeWarning:triton\.runtime\.interpreter"
    ),
    # Sums call numpy directly.
    pytest.mark.filterwarnings(r"ignore:(overflow|invalid value) encountered in reduce:RuntimeWarning"),
]
