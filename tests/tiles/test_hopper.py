"""The Hopper kernels, without a device: they compile, they fit into its shared memory, and they are launched as Triton does it."""

from __future__ import annotations

import pytest
from compiling import compiled_apart

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, int8
from megabatch.tiles.fused.hopper import pipeline
from megabatch.tiles.fused.hopper import saved_products
from megabatch.tiles.fused.hopper.softmax_backward import gradient_kernel
from megabatch.tiles.fused.hopper.softmax_forward import LAG_TO_SAVE, OUT_SLOTS, Y_SLOTS_TO_SAVE, stats_kernel
from megabatch.tiles.fused.tuned_configs import TUNED

def described(width, dtype=bfloat16, rows=pipeline.TILE):
    layout = NVMMASharedLayout.get_default_for([rows, width], dtype)
    name = {bfloat16: "bf16", int8: "i8"}[dtype]
    return f"tensordesc<{name}[{rows}, {width}],{layout!r}>"

def compiled(kernel, sizes, dtype=bfloat16, **without):
    depth = 8 * pipeline.STEP_BYTES // dtype.primitive_bitwidth
    constants = {"IS_LOCAL": True, "WIDTH": 768, "M": pipeline.TILE, "N": pipeline.TILE, "K": depth, **sizes, **without}
    kinds = dict.fromkeys(("x", "y"), described(depth, dtype))
    kinds |= dict.fromkeys(("gradient", "saved"), described(pipeline.TILE // 4))
    kinds |= dict.fromkeys(("rows", "columns", "shift"), "i32") | dict.fromkeys(("needs_fallback", "ids_M", "ids_N"), "*i32")
    kinds |= dict.fromkeys(("matches", "large"), "*i8")
    check(kernel, kinds, constants)

def check(kernel, kinds, constants):
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, constants, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(pipeline.OPTIONS))
    assert found.metadata.shared <= 227 * 1024, found.metadata.shared
    assert "wgmma.mma_async" in found.asm["ptx"] and found.asm["cubin"]

no_ids = dict.fromkeys(("matches", "ids_M", "ids_N"))
no_shares = dict.fromkeys(("row_counted", "column_counted"))
no_steps = dict.fromkeys(("row_step", "row_bias", "column_step", "column_bias", "limit", "large"))
for entry in json.loads(TUNED.read_text())["pipelines"]:
    sizes = {name.upper(): entry[name] for name in ("group", "x_slots", "y_slots", "lag")}
    if entry["kind"] not in ("bfloat16", "int8") or entry["width"] != 768:
        continue
    if entry["kernel"] == "stats":
        compiled(stats_kernel, {**sizes, "OUT_SLOTS": 0}, saved=None, **no_ids)
        compiled(stats_kernel, {**sizes, "OUT_SLOTS": 0}, saved=None)
        sizes |= {"Y_SLOTS": Y_SLOTS_TO_SAVE, "LAG": LAG_TO_SAVE, "OUT_SLOTS": OUT_SLOTS}
        compiled(stats_kernel, sizes, **no_ids)
        compiled(stats_kernel, sizes)
    elif entry["kernel"] == "gradient":
        sizes |= {"OUT_SLOTS": entry["out_slots"], "MATCH_WIDTH": pipeline.TILE}
        if entry["kind"] == "int8":
            compiled(gradient_kernel, sizes, int8, **no_ids, **no_shares)
            compiled(gradient_kernel, sizes, int8, **no_shares)
        else:
            compiled(gradient_kernel, sizes, **no_ids, **no_shares, **no_steps)
            compiled(gradient_kernel, sizes, **no_steps)
    print(entry["kernel"])
rows, depth, columns = saved_products.ROWS, saved_products.DEPTH, saved_products.COLUMNS
for transposed in (False, True):
    kinds = {"exp": described(*((rows, bfloat16, depth) if transposed else (depth, bfloat16, rows)))}
    kinds |= {"embeddings": described(columns, bfloat16, depth)} | dict.fromkeys(("high", "low", "inner"), "*bf16")
    kinds |= dict.fromkeys(("rows", "steps"), "i32")
    sizes = {"WIDTH": 768, "M": rows, "K": depth, "N": columns, "SLOTS": saved_products.SLOTS}
    check(saved_products.product_kernel, kinds, {"TRANSPOSED": transposed, **sizes})
print("product")
"""


@pytest.mark.slow
def test_they_compile_for_hopper():
    assert sorted(compiled_apart(COMPILE)) == ["gradient", "gradient", "product", "stats"]


# A driver that compiles for Hopper, and keeps what it is to launch.
LAUNCH = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from megabatch.tiles.contract import Softmax
from megabatch.tiles.fused import launch
from megabatch.tiles.fused.hopper import saved_products
from megabatch.tiles.fused.unshifted_gains import unshifted_gains

class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *arguments):
        launches.append((self.name, x, y, z, stream, function, packed_metadata, *map(comparable, arguments)))

class Utilities:
    loaded = 0

    def load_binary(self, *arguments):
        self.loaded += 1
        return None, self.loaded, 64, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

class Driver:
    utils, launcher_cls = Utilities(), Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

def comparable(argument):
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.stride()
    if hasattr(argument, "block_shape"):
        return comparable(argument.base), *argument.block_shape, argument.layout
    return type(argument), argument

def search(*arguments, **named):
    raise AssertionError("Triton searches for a kernel that was launched before")

driver.set_active(Driver())
torch.cuda.is_initialized, torch.cuda.current_device, launch._stream = lambda: True, lambda: 0, lambda device: 7
# Tensors can be compared; the addresses of two runs differ.
launch.addresses = tuple
rows, marks, scale = Softmax(*torch.rand(2, 300)), torch.zeros(launch.MARKS, dtype=torch.int32), torch.tensor(20.0)
panel, embeddings = torch.rand(300, 256).bfloat16(), torch.rand(300, 256).bfloat16()

def launched():
    global launches
    launches = []
    gains = unshifted_gains(scale, rows, columns, marks)
    outer, inner = saved_products.bf16_gains(*gains, 384, 256, marks)
    saved_products.write_product(panel, embeddings[:256], outer, inner, torch.empty(300, 256), transposed=False)
    saved_products.write_product(panel, embeddings, inner, outer, torch.empty(256, 256), transposed=True)
    return launches

columns = Softmax(*torch.rand(2, 256))
first = launched()
JITFunction.run = search
second = launched()
assert first == second, (first, second)
print(*(name for name, *_ in first))
"""


@pytest.mark.slow
def test_a_further_launch_passes_what_triton_passed_in_the_first_one():
    kernels = ["unshifted_gains_kernel", "bf16_gains_kernel", "product_kernel", "product_kernel"]
    assert compiled_apart(LAUNCH) == kernels
