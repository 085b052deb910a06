"""Softmax over classes with the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from classes_cases import OPTIONS, class_errors
from interpreted import IN_INTERPRETER

pytestmark = IN_INTERPRETER


def test_a_class_with_several_rows_is_left_out_of_their_sums():
    errors = class_errors({"margin": 0.35}, torch.float32, "cpu", rows=17, classes=20, width=8, backend="fused")
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_kernels_are_as_exact_as_fp32_sums_allow(options):
    errors = class_errors(options, torch.float32, "cpu", backend="fused", workspace=4000)
    assert max(errors.values()) <= 2e-5, errors
