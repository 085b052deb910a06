"""What of the kernels for Hopper can be seen without one: they compile, and the device has the shared memory that they need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

# In a process of its own: where kernels are interpreted, none can be compiled.
COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, int8
from megabatch.tiles.fused import hopper
from megabatch.tiles.fused.blocks import MEASURED

stats_kernel, gradient_kernel, sigmoid_kernel = map(hopper._kernel, ("stats", "gradient", "sigmoid"))

def described(width, dtype=bfloat16):
    layout = NVMMASharedLayout.get_default_for([hopper.TILE, width], dtype)
    name = {bfloat16: "bf16", int8: "i8"}[dtype]
    return f"tensordesc<{name}[{hopper.TILE}, {width}],{layout!r}>"

def compiled(kernel, sizes, dtype=bfloat16, **without):
    depth = 8 * hopper.DEPTH // dtype.primitive_bitwidth
    constants = {"IS_LOCAL": True, "WIDTH": 768, "M": hopper.TILE, "N": hopper.TILE, "K": depth, **sizes, **without}
    kinds = dict.fromkeys(("x", "y"), described(depth, dtype)) | {"gradient": described(hopper.TILE // 4)}
    kinds |= dict.fromkeys(("rows", "columns", "shift"), "i32") | dict.fromkeys(("needs_fallback", "ids_M", "ids_N"), "*i32")
    kinds |= dict.fromkeys(("matches", "large"), "*i8")
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constants, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(hopper.OPTIONS))
    assert found.metadata.shared <= 227 * 1024, found.metadata.shared
    assert "wgmma.mma_async" in found.asm["ptx"] and found.asm["cubin"]

no_ids = dict.fromkeys(("matches", "ids_M", "ids_N"))
no_shares = dict.fromkeys(("row_counted", "column_counted"))
no_steps = dict.fromkeys(("row_step", "column_step", "limit", "large"))
for entry in json.loads(MEASURED.read_text())["rings"]:
    sizes = {name.upper(): entry[name] for name in ("group", "x_slots", "y_slots", "behind")}
    if entry["kind"] not in ("bfloat16", "int8") or entry["width"] != 768:
        continue
    if entry["kernel"] == "stats":
        compiled(stats_kernel, sizes, SMOOTHED=False, **no_ids)
        compiled(stats_kernel, sizes, SMOOTHED=True)
    elif entry["kernel"] == "gradient":
        sizes |= {"PLACES": entry["places"], "MARKED": hopper.TILE}
        if entry["kind"] == "int8":
            compiled(gradient_kernel, sizes, int8, **no_ids, **no_shares)
            compiled(gradient_kernel, sizes, int8, **no_shares)
        else:
            compiled(gradient_kernel, sizes, **no_ids, **no_shares, **no_steps)
            compiled(gradient_kernel, sizes, **no_steps)
    else:
        sizes["PLACES"] = entry["places"]
        compiled(sigmoid_kernel, sizes, **no_ids, weights_M=None)
        compiled(sigmoid_kernel, sizes)
    print(entry["kernel"])
"""


def test_they_compile_for_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sorted(ended.stdout.split()) == ["gradient", "gradient", "sigmoid", "stats"]
