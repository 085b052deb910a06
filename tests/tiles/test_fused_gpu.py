"""The losses on a CUDA device: right in every dtype, without host synchronisation, in bounded memory."""

from __future__ import annotations

import itertools
import queue
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from cases import CLIP_OPTIONS, Case, build, embeddings, errors, formula, largest_logit
from reduction_kernel import expected, integers, rows_and_columns

import megabatch
from megabatch import reference
from megabatch.ring import BLOCK, RESULT, Ring
from megabatch.tiles import backend_name, fused
from megabatch.tiles.contract import ComputeOptions, NeedsGrad, Pairs, Softmax
from megabatch.tiles.fused import architectures, gradient_panels, launch, tuned_configs

pytestmark = [
    pytest.mark.usefixtures("tiles_only"),
    # Arithmetic is tested with scales that are useless for training.
    pytest.mark.filterwarnings("ignore:scale="),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CLIP = [
    {k: v for group in groups for k, v in group.items()}
    for groups in itertools.product(
        *(CLIP_OPTIONS[name] for name in ("ids", "label_smoothing", "drop_above", "weights", "direction"))
    )
]
SIGLIP = [
    {k: v for group in groups for k, v in group.items()}
    for groups in itertools.product(CLIP_OPTIONS["ids"], CLIP_OPTIONS["weights"], ({}, {"extra": 7}))
]


def on_gpu(case: Case, dtype: torch.dtype, **more) -> dict[str, torch.Tensor]:
    tensors = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}

    class Losses:
        """The losses, with their scalars moved to the device."""

        def __getattr__(self, name):
            return lambda x, y, *scalars, **options: getattr(megabatch, name)(x, y, *(s.cuda() for s in scalars), **options)

    moved = Case(case.loss, case.x.cuda(), case.y.cuda(), case.scalars, tensors)
    return {name: t.cpu() for name, t in moved.run(Losses(), dtype, **more).items()}


def assert_the_formula(loss: str, options: dict, dtype: torch.dtype, **more) -> None:
    for scale in (0.5, 20.0, 300.0):
        scalars = (scale,) if loss == "clip_loss" else (scale, -3.0)
        case = build(loss, 137, scalars, options, width=24).rounded(dtype)
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        # As on a CPU. The gradient products of bf16 and fp16 embeddings round the gradient in the logits to their dtype.
        allowed = 32 * eps * (1 + largest_logit(case))
        rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 0
        for name, e in errors(case, on_gpu(case, dtype, workspace=40_000, **more), formula(case)).items():
            assert e <= allowed + (0 if name == "value" else rounding), (options, scale, name, e)


@pytest.mark.parametrize("options", CLIP, ids=str)
def test_every_combination_of_options_of_the_softmax_loss_is_the_formula(options):
    assert_the_formula("clip_loss", options, torch.bfloat16)


@pytest.mark.parametrize("options", SIGLIP, ids=str)
def test_every_combination_of_options_of_the_sigmoid_loss_is_the_formula(options):
    assert_the_formula("siglip_loss", options, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [CLIP[0], CLIP[-1], *CLIP[7::29]], ids=str)
def test_other_dtypes_are_the_formula_too(options, dtype):
    assert_the_formula("clip_loss", options, dtype)
    alike = {k: v for k, v in options.items() if k in ("ids", "duplicates", "weights", "extra")}
    assert_the_formula("siglip_loss", alike, dtype)


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_both_backends_can_be_chosen(backend):
    assert_the_formula("clip_loss", {"ids": True}, torch.bfloat16, backend=backend)


def test_the_fused_tiles_are_chosen_where_supported():
    device = torch.device("cuda")
    assert backend_name(device, torch.bfloat16) == backend_name(device, torch.float32) == "fused"
    assert backend_name(device, torch.float64) == "eager"
    with pytest.raises(ValueError, match="float64"):
        backend_name(device, torch.float64, "fused")


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_devices_without_tensor_descriptors_compute_the_same(loss, dtype, monkeypatch):
    pretend_an_unknown_device(monkeypatch)
    assert_the_formula(loss, {"ids": True, "extra": 7, **({"symmetric": False} if loss == "clip_loss" else {})}, dtype)


def pretend_an_unknown_device(monkeypatch) -> None:
    """Use the kernels of a device without tensor descriptors, with blocks that were not tuned for it."""
    monkeypatch.setattr(architectures, "ARCHITECTURES", (launch.Architecture("without descriptors", (8, 0)),))
    monkeypatch.setattr(launch, "blocks_for", lambda kernel, device, dtype, *_: tuned_configs._guess(device, dtype, "ieee"))


@pytest.fixture
def exp_is_always_saved(monkeypatch):
    widths = dict.fromkeys(("bfloat16", "float16", "tf32", "ieee"), 0)
    monkeypatch.setattr(gradient_panels, "MIN_WIDTH_TO_SAVE_EXP", widths)


@pytest.mark.usefixtures("exp_is_always_saved")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ids": True, "weights": True},
        {"symmetric": False, "extra": 7},
        {"ids": True, "label_smoothing": 0.1},
        {"symmetric": False, "extra": 7, "label_smoothing": 0.3, "weights": True},
    ],
    ids=str,
)
def test_saved_exponentials_give_the_formula_too(options, dtype, monkeypatch):
    assert_the_formula("clip_loss", options, dtype)
    pretend_an_unknown_device(monkeypatch)
    assert_the_formula("clip_loss", options, dtype)


@pytest.mark.usefixtures("exp_is_always_saved")
@pytest.mark.parametrize("diagnostics", [False, True])
@pytest.mark.parametrize("rows", [1, 129, 700])
def test_saved_exponentials_of_any_shape_are_right_and_every_element_is_written(rows, diagnostics):
    torch.use_deterministic_algorithms(True)
    try:
        for width, scale in itertools.product((7, 100, 768), (30.0, -30.0)):
            x, y = (t.to(torch.bfloat16).cuda().requires_grad_() for t in embeddings(rows, width=width, kind="clustered"))
            found = megabatch.clip_loss(x, y, scale, diagnostics=diagnostics)
            (found[0] if diagnostics else found).backward()
            case = Case("clip_loss", x.detach().double().cpu(), y.detach().double().cpu(), (scale,))
            true = {name: t for name, t in formula(case).items() if name in ("x", "y")}
            own = {"x": x.grad.double().cpu(), "y": y.grad.double().cpu()}
            assert all(e <= 1e-2 for e in errors(case, own, true).values()), (width, scale, errors(case, own, true))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("exp_is_always_saved")
def test_more_exponentials_are_saved_than_int32_can_index(monkeypatch):
    from megabatch.tiles.fused import softmax_forward

    rows, width, saved, allocate = 50_000, 64, [], softmax_forward.allocate_saved_exp

    def allocate_and_note(launch, compute):
        saved.append(allocate(launch, compute))
        return saved[-1]

    monkeypatch.setattr(softmax_forward, "allocate_saved_exp", allocate_and_note)
    g = torch.Generator(device="cuda").manual_seed(0)
    x, y = (torch.randn(rows, width, device="cuda", generator=g).bfloat16().requires_grad_() for _ in range(2))
    loss = megabatch.clip_loss(x, y, 0.2, workspace=6 * 2**30)
    (panel,) = (each.panel for each in saved)
    assert panel.rows == panel.columns == rows
    saved.clear()
    found = torch.autograd.grad(loss, (x, y), retain_graph=True)
    again = torch.autograd.grad(loss, (x, y))
    assert all((a.float() - b.float()).norm() < 1e-2 * b.float().norm() for a, b in zip(found, again, strict=True))
    assert all(
        (a[-100:].float() - b[-100:].float()).norm() < 1e-2 * b[-100:].float().norm() for a, b in zip(found, again, strict=True)
    )


@pytest.mark.parametrize("width", [1, 7, 100, 1152])
@pytest.mark.parametrize("rows", [1, 2, 129, 700])
def test_any_shape_is_right_and_every_element_is_written(rows, width):
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    try:
        for loss in ("clip_loss", "siglip_loss"):
            x, y = embeddings(rows, width=width, kind="clustered")
            case = Case(loss, x, y, (30.0, -5.0)[: 1 if loss == "clip_loss" else 2]).rounded(torch.bfloat16)
            for name, e in errors(case, on_gpu(case, torch.bfloat16), formula(case)).items():
                assert e <= (2e-5 if name == "value" else 1e-2), (loss, name, e)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_the_error_is_not_larger_than_that_of_the_formula_in_this_dtype(loss, dtype):
    x, y = embeddings(3000, width=256, kind="clustered")
    case = Case(loss, x, y, (50.0, -10.0)[: 1 if loss == "clip_loss" else 2]).rounded(dtype)
    true = formula(case)
    plain = Case(case.loss, case.x.cuda(), case.y.cuda(), case.scalars)
    x, y = (t.to(dtype).requires_grad_() for t in (plain.x, plain.y))
    value = getattr(reference, loss)(x, y, *case.scalars)
    value.backward()
    theirs = errors(
        case,
        {"value": value.detach().double().cpu(), "x": x.grad.double().cpu(), "y": y.grad.double().cpu()},
        {k: true[k] for k in ("value", "x", "y")},
    )
    own = errors(case, on_gpu(case, dtype), true)
    for name in theirs:
        assert own[name] <= 1.5 * theirs[name] + 8 * torch.finfo(torch.float32).eps, (name, own[name], theirs[name])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_a_step_never_waits_for_the_device(loss):
    x, y = (t.cuda().bfloat16().requires_grad_() for t in embeddings(500, width=64))
    scalars = [torch.tensor(s, device="cuda", requires_grad=True) for s in (20.0, -10.0)][: 1 if loss == "clip_loss" else 2]
    ids = torch.arange(500, device="cuda") // 2

    def step():
        getattr(megabatch, loss)(x, y, *scalars, ids=ids, diagnostics=True)[0].backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
@pytest.mark.parametrize("scale", [20.0, 300.0])
def test_ten_runs_are_bit_equal(loss, scale):
    x, y = (t.cuda().bfloat16() for t in embeddings(3000, width=128))
    ids = torch.arange(3000, device="cuda") // 2
    runs = []
    for _ in range(10):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        value, found = getattr(megabatch, loss)(
            a, b, *(scale, -5.0)[: 1 if loss == "clip_loss" else 2], ids=ids, workspace=2**22, diagnostics=True
        )
        value.backward()
        runs.append((value.detach(), a.grad, b.grad, found.row_rank, found.column_hardest))
    assert all(torch.equal(s, t) for run in runs[1:] for s, t in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
@pytest.mark.parametrize("collapsed", [False, True], ids=["integers", "collapsed"])
def test_ranks_and_hardest_negatives_are_exact_ties_included(loss, dtype, collapsed):
    # Products of small integers are exact in every dtype, and many are equal; all of them where all embeddings are equal.
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-1, 2, (700, 24), generator=g).cuda() for _ in range(2))
    if collapsed:
        x, y = torch.ones_like(x), torch.ones_like(y)
    ids = torch.arange(700, device="cuda") % 690
    scalars = (0.5, -1.0)[: 1 if loss == "clip_loss" else 2]
    found = getattr(megabatch, loss)(x.to(dtype), y.to(dtype), *scalars, ids=ids, diagnostics=True, workspace=2**20)[1]
    z = (x.double() @ y.double().T).masked_fill(ids[:, None] == ids, -torch.inf)
    own = (x * y).sum(1).double()
    assert torch.equal(found.row_rank, (z >= own[:, None]).sum(1)) and torch.equal(found.column_rank, (z >= own).sum(0))
    assert torch.equal(found.row_hardest.double(), z.amax(1)) and torch.equal(found.column_hardest.double(), z.amax(0))


@pytest.mark.parametrize("product", [True, False], ids=["of a product", "of any tile"])
@pytest.mark.parametrize("op", [0, 1, 2], ids=["sums", "maxima", "products"])
@pytest.mark.parametrize("m, n, warps", [(64, 64, 4), (128, 64, 4), (128, 128, 8), (256, 32, 4)])
def test_reductions_of_rows_and_columns_are_exact_in_any_layout(m, n, warps, op, product):
    values = integers(m, n, op).cuda()
    for found, true in zip(rows_and_columns(values, op, warps, product), expected(values, op), strict=True):
        assert torch.equal(found, true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_loss_keeps_its_digits(dtype):
    x, _ = embeddings(200, width=96)
    case = Case("clip_loss", x, x, (25.0,)).rounded(dtype)
    true = formula(case)["value"]
    assert 0 < true < 1e-6
    assert abs(on_gpu(case, dtype)["value"] - true) < 1e-3 * true


def test_autocast_rounds_the_embeddings_and_nothing_else():
    x, y = embeddings(200, width=64)
    true = formula(Case("clip_loss", x, y, (50.0,)).rounded(torch.bfloat16))
    a, b = x.float().cuda().requires_grad_(), y.float().cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = megabatch.clip_loss(a, b, 50.0)
    loss.backward()
    assert loss.dtype == a.grad.dtype == torch.float32
    assert abs(loss.item() - true["value"].item()) < 1e-4
    assert (a.grad.double().cpu() - true["x"]).norm() < 4e-3 * true["x"].norm()


def test_a_group_of_one_over_nccl_is_one_process(tmp_path):
    x, y = (t.cuda().requires_grad_() for t in embeddings(50, width=16))
    alone = megabatch.siglip_loss(x, y, 20.0, -10.0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        together = megabatch.siglip_loss(x, y, 20.0, -10.0, group=dist.group.WORLD)
        gradients = [torch.autograd.grad(loss, (x, y)) for loss in (alone, together)]
    finally:
        dist.destroy_process_group()
    assert torch.equal(alone, together)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("gap", [50.0, 1000.0, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_extreme_logits_are_right(loss, dtype, gap):
    x, y = embeddings(300, width=16, seed=1)
    x = x * torch.where(torch.arange(300) % 3 == 0, gap, 1.0)[:, None].double()
    y[5:7] *= gap
    case = Case(loss, x, y, (1.0, -2.0)[: 1 if loss == "clip_loss" else 2]).rounded(dtype)
    rounding = 0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for name, e in errors(case, on_gpu(case, dtype), formula(case)).items():
        assert e < 64 * torch.finfo(torch.float32).eps + (0 if name == "value" else rounding), (name, e)


def test_ordinary_logits_up_to_openclips_largest_scale_are_right_beside_extreme_ones():
    """Only some programs have tiles that need the fallback; the others must not be affected."""
    x, y = embeddings(2000, width=32, kind="clustered", seed=4)
    x[700] *= 40
    y[1300] *= -30
    case = Case("clip_loss", x, y, (100.0,)).rounded(torch.float32)
    for name, e in errors(case, on_gpu(case, torch.float32), formula(case)).items():
        assert e < 32 * torch.finfo(torch.float32).eps * 100, (name, e)


def test_more_elements_than_int32_can_index():
    rows, width = 2**21 + 40, 1024
    g = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, generator=g)
    y = torch.randn(300, width, device="cuda", dtype=torch.bfloat16, generator=g)
    scale, pairs, compute = torch.tensor(0.05, device="cuda"), Pairs(), ComputeOptions(2**29)
    stats = fused.softmax_stats(x, y, scale, pairs, columns=False, compute=compute).rows
    softmax = Softmax(stats.peak, 1 / stats.total)
    gx, gy = fused.softmax_grads(x, y, scale, pairs, softmax, None, needs_grad=NeedsGrad(True, True), compute=compute)
    tail = x[-100:].double()
    p = (0.05 * tail @ y.double().T).softmax(1)
    assert torch.allclose(gx[-100:].double(), p @ y.double(), atol=2e-2, rtol=2e-2)
    assert torch.allclose(gy.sum(0).double() / rows, x.double().mean(0), atol=1e-3)


def test_a_training_step_can_be_captured_in_a_graph():
    tower = torch.nn.Linear(64, 32, device="cuda")
    scale = torch.nn.Parameter(torch.tensor(20.0, device="cuda"))
    optimizer = torch.optim.SGD([*tower.parameters(), scale], lr=1e-3)
    inputs = [torch.randn(1000, 64, device="cuda") for _ in range(2)]
    ids = torch.arange(1000, device="cuda") // 2

    def step():
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x, y = (torch.nn.functional.normalize(tower(t), dim=1) for t in inputs)
            loss, _ = megabatch.clip_loss(x, y, scale, ids=ids, diagnostics=True)
            loss = loss + megabatch.siglip_loss(x, y, scale, -5.0)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    before = [p.detach().clone() for p in (*tower.parameters(), scale)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for p, old in zip((*tower.parameters(), scale), before, strict=True):
        p.data.copy_(old)
    graph.replay()
    replayed, after = captured.clone(), [p.detach().clone() for p in (*tower.parameters(), scale)]
    for p, old in zip((*tower.parameters(), scale), before, strict=True):
        p.data.copy_(old)
    assert torch.equal(step(), replayed)
    assert all(torch.equal(p, q) for p, q in zip((*tower.parameters(), scale), after, strict=True))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_fp32_has_the_precision_of_its_option(precision):
    x, y = embeddings(1500, width=256, kind="clustered")
    case = Case("clip_loss", x, y, (50.0,)).rounded(torch.float32)
    torch.set_float32_matmul_precision("high")  # which must change nothing
    try:
        found = errors(case, on_gpu(case, torch.float32, precision=precision), formula(case))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found["x"] < 1e-5 if precision == "ieee" else 1e-5 < found["x"] < 1e-2


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_two_simulated_ranks_are_one_process(loss, monkeypatch):
    x, y = (t.cuda().bfloat16() for t in embeddings(700, width=64, kind="clustered"))
    scalars = (30.0, -5.0)[: 1 if loss == "clip_loss" else 2]
    ids = torch.arange(700, device="cuda") // 2

    def run(rows: slice) -> tuple:
        a, b = x[rows].clone().requires_grad_(), y[rows].clone().requires_grad_()
        with torch.autograd.set_multithreading_enabled(False):
            value = getattr(megabatch, loss)(a, b, *scalars, ids=ids[rows], group=None)
            value.backward()
        return value.detach(), a.grad, b.grad

    alone = run(slice(0, 700))
    ranks = SimulatedRing.of_size(2)
    of_this_thread = threading.local()
    monkeypatch.setattr(Ring, "of", classmethod(lambda cls, group: of_this_thread.ring))

    def rank(place: int) -> tuple:
        of_this_thread.ring = ranks[place]
        return run((slice(0, 300), slice(300, 700))[place])

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(rank, range(2)))
    assert all(torch.allclose(value, alone[0], rtol=1e-6) for value, *_ in together)
    for side in (1, 2):
        # The graph of each of the two ranks contributes a gradient of one.
        assert torch.allclose(torch.cat([found[side] for found in together]) / 2, alone[side], rtol=2e-2, atol=1e-5)


class SimulatedRing(Ring):
    """One rank of a ring whose ranks are threads on one device."""

    backends: ClassVar = {"cpu": "gloo", "cuda": "nccl"}

    @classmethod
    def of_size(cls, size: int) -> list[SimulatedRing]:
        ranks = [cls(None) for _ in range(size)]
        barrier, table = threading.Barrier(size), [None] * size
        for place, rank in enumerate(ranks):
            rank.rank, rank.size, rank.barrier, rank.table = place, size, barrier, table
            rank.mail = {}
        for rank in ranks:
            rank.after = ranks[(rank.rank + 1) % size]
            for tag in (BLOCK, RESULT):
                rank.mail[tag] = queue.Queue()
        return ranks

    def _all(self, value):
        self.table[self.rank] = value
        self.barrier.wait()
        every = list(self.table)
        self.barrier.wait()
        return every

    def gather(self, numbers, device):
        return self._all(list(numbers))

    def sum(self, numbers):
        return sum(self._all(numbers.clone()))

    def _pass_on(self, tree, length, tag):
        self.after.mail[tag].put(tree)
        return lambda: self.mail[tag].get(timeout=60)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_the_sanitizer_finds_nothing(tmp_path):
    script = tmp_path / "small.py"
    script.write_text(
        "import torch, megabatch\n"
        "x, y = (torch.randn(200, 24, device='cuda', dtype=torch.bfloat16).requires_grad_() for _ in range(2))\n"
        "ids = torch.arange(200, device='cuda') // 2\n"
        "megabatch.clip_loss(x, y, 3.0, ids=ids, diagnostics=True, workspace=40_000)[0].backward()\n"
        "megabatch.siglip_loss(x, y, 300.0, -5.0, ids=ids, workspace=40_000).backward()\n"
    )
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0 and "ERROR SUMMARY: 0 errors" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_extra_memory_grows_linearly_at_most(loss):
    def extra(rows: int) -> int:
        x, y = (torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(megabatch, loss)(x, y, *(0.1, -5.0)[: 1 if loss == "clip_loss" else 2]).backward()
        return torch.cuda.max_memory_allocated() - before

    extra(64)
    small, large = extra(16_384), extra(65_536)
    assert large - small <= 10 * (65_536 - 16_384) * 128 * 4
