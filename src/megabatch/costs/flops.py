"""FLOP of matrix products, by torch's own formulas (torch.utils.flop_counter).

Two of their faults are put right: the attention of CPUs, which they do not know, has a formula here, and the backward of a
convolution in groups, which they count once for every channel, is twice its forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

aten = torch.ops.aten


def flops_of(operator: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Of one call; 0 for what multiplies no matrices."""
    packet = operator._overloadpacket
    if packet is aten.convolution_backward:
        gradient, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        return float(sum(wanted[:2]) * conv_flop_count(x.shape, weight.shape, gradient.shape, transposed))
    if "scaled_dot_product" in packet.__name__:
        return _attention(operator, args, kwargs)
    return float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0.0


def _attention(operator: Any, args: Any, kwargs: Any) -> float:
    """Forward has two products of the scores' size, backward five; of a causal one, kernels leave out half."""
    backward = "backward" in operator._schema.name
    query, key, value = args[1:4] if backward else args[:3]
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    share = (2.5 if backward else 1.0) * (0.5 if given.get("is_causal") else 1.0)
    return share * float(sdpa_flop_count(query.shape, key.shape, value.shape))
