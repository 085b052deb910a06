"""The Hopper kernels on a GPU: used where they are supported and faster, and right in every such case."""

from __future__ import annotations

import collections
import itertools
import shutil
import subprocess
import sys

import pytest
import torch
from cases import Case, build, embeddings, errors, formula
from test_fused_gpu import assert_the_formula, on_gpu

import megabatch
from megabatch.tiles.fused import architectures, gradient_panels
from megabatch.tiles.fused.launch import Launch, run_kernel

CUDA = torch.device("cuda")
hopper = architectures.architecture_of(CUDA).load_kernels() if torch.cuda.is_available() else None

pytestmark = [
    pytest.mark.usefixtures("tiles_only"),
    pytest.mark.gpu,
    # Some cases have a scale below 1.
    pytest.mark.filterwarnings("ignore:scale="),
    pytest.mark.skipif(hopper is None, reason="needs a Hopper device and a version of Triton that its kernels were run with"),
]

OPTIONS = [
    {k: v for group in groups for k, v in group.items()}
    for groups in itertools.product(
        ({}, {"ids": True}),
        ({}, {"label_smoothing": 0.1}),
        ({}, {"weights": True}),
        ({}, {"symmetric": False}, {"symmetric": False, "extra": 7}),
    )
]


@pytest.fixture
def launched(monkeypatch):
    """How often each kernel is launched."""
    from megabatch.tiles.fused.hopper import saved_products, softmax_backward, softmax_forward

    number = collections.Counter()

    def counted(kernel, *args, **constants):
        number[kernel.__name__.removesuffix("_kernel")] += 1
        run_kernel(kernel, *args, **constants)

    correct = softmax_backward.correct_large

    def counted_correct(*args):
        number["correct"] += 1
        correct(*args)

    for module in (softmax_forward, softmax_backward, saved_products):
        monkeypatch.setattr(module, "run_kernel", counted)
    monkeypatch.setattr(softmax_backward, "correct_large", counted_correct)
    return number


@pytest.fixture
def small_panels(monkeypatch, launched):
    """Use the Hopper kernels for every panel that they support, however small."""
    from megabatch.tiles.fused.hopper import pipeline, saved_products

    tuned = pipeline.pipeline_for
    monkeypatch.setattr(pipeline, "pipeline_for", lambda *args: (found := tuned(*args)) and found._replace(min_tile_pairs=0))
    monkeypatch.setattr(saved_products, "MIN_BUSY", 0)
    return launched


@pytest.fixture
def everywhere(monkeypatch, small_panels):
    """Save no exponentials, so that all panels are computed again."""
    monkeypatch.setattr(gradient_panels, "MIN_WIDTH_TO_SAVE_EXP", {})
    return small_panels


@pytest.fixture
def saved(monkeypatch, small_panels):
    """Save exponentials of any width."""
    monkeypatch.setattr(gradient_panels, "MIN_WIDTH_TO_SAVE_EXP", {"bfloat16": 0})
    return small_panels


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_saved_exponentials_give_the_formula(options, saved):
    # Once in one panel, once in several of which the first is saved.
    for workspace in (2**24, 2**18):
        case = build("clip_loss", 700, (20.0,), options, width=512).rounded(torch.bfloat16)
        for name, e in errors(case, on_gpu(case, torch.bfloat16, workspace=workspace), formula(case)).items():
            assert e <= (2e-5 if name == "value" else 1e-2), (workspace, name, e)
    # With label smoothing, gradients need more than exponentials and gains.
    assert bool(saved["stats"]) == ("label_smoothing" not in options)
    # With one softmax, cuBLAS multiplies them.
    assert bool(saved["product"]) == ("label_smoothing" not in options and "symmetric" not in options)


@pytest.mark.parametrize("width", [254, 256, 300, 768])
@pytest.mark.parametrize("rows", [1, 2, 63, 129, 257, 700])
def test_saved_exponentials_of_any_shape_are_right_and_every_element_is_written(rows, width, saved):
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    try:
        for scale, symmetric in itertools.product((30.0, -30.0), (True, False)):
            options = {"symmetric": symmetric}
            case = Case("clip_loss", *embeddings(rows, width=width, kind="clustered"), (scale,), options).rounded(torch.bfloat16)
            for name, e in errors(case, on_gpu(case, torch.bfloat16), formula(case)).items():
                assert e <= (2e-5 if name == "value" else 1e-2), (scale, symmetric, name, e)
    finally:
        torch.use_deterministic_algorithms(False)
    assert saved["stats"] and saved["product"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("gap", [50.0, 1000.0, 1e5])
def test_products_with_extreme_logits_are_those_of_the_gradient(gap, symmetric, saved):
    x, y = embeddings(300, width=256, seed=1)
    x = x * torch.where(torch.arange(300) % 3 == 0, gap, 1.0)[:, None].double()
    y[5:7] *= gap
    case = Case("clip_loss", x, y, (1.0,), {"symmetric": symmetric}).rounded(torch.bfloat16)
    for name, e in errors(case, on_gpu(case, torch.bfloat16), formula(case)).items():
        assert e < 64 * torch.finfo(torch.float32).eps + (0 if name == "value" else 2 * torch.finfo(torch.bfloat16).eps), (name, e)
    assert bool(saved["product"]) == symmetric


@pytest.mark.parametrize("exponentials", ["saved", "everywhere"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("options", [{}, {"symmetric": False}, {"label_smoothing": 0.1}], ids=str)
def test_unit_vectors_set_no_mark_at_a_temperature_of_a_hundredth(options, int8, exponentials, request, monkeypatch):
    launched, marks, new_marks = request.getfixturevalue(exponentials), [], Launch.new_marks
    monkeypatch.setattr(Launch, "new_marks", lambda self, passes=1: marks.append(new_marks(self, passes)) or marks[-1])
    for similarity, scale in itertools.product((0.9, 0.0), (100.0, 70.0)):
        x, y = (torch.nn.functional.normalize(t, dim=1) for t in embeddings(700, width=511))
        x, y = (torch.cat((t * (1 - similarity) ** 0.5, t.new_full((700, 1), similarity**0.5)), 1) for t in (x, y))
        case = Case("clip_loss", x, y, (scale,), options).rounded(torch.bfloat16)
        for name, e in errors(case, on_gpu(case, torch.bfloat16, int8_backward=int8), formula(case)).items():
            assert e <= (2e-4 if name == "value" else 1e-2), (similarity, scale, name, e)
    assert marks and not torch.stack([each.any() for each in marks]).any()
    # With label smoothing there is no int8.
    assert bool(launched["correct"]) == (int8 and exponentials == "everywhere" and "label_smoothing" not in options)


def test_one_side_alone_has_the_same_gradient(saved):
    x, y = (t.cuda().bfloat16() for t in embeddings(1000, width=256))
    both = [t.clone().requires_grad_() for t in (x, y)]
    megabatch.clip_loss(*both, 20.0).backward()
    for place in range(2):
        one = [t.clone().requires_grad_(place == i) for i, t in enumerate((x, y))]
        megabatch.clip_loss(*one, 20.0).backward()
        assert torch.equal(one[place].grad, both[place].grad)
    assert saved["product"] == 4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_steps_that_save_are_bit_equal_can_be_captured_and_never_wait(saved):
    x, y = (t.cuda().bfloat16().requires_grad_() for t in embeddings(1000, width=256))
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)

    def step():
        return torch.autograd.grad(megabatch.clip_loss(x, y, scale), (x, y, scale))

    runs = [step() for _ in range(10)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs.append(step())
    graph.replay()
    assert saved["stats"] and saved["product"]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_large_batch_multiplies_saved_exponentials_and_agrees_with_the_portable_kernels(symmetric, launched, monkeypatch):
    g = torch.Generator(device="cuda").manual_seed(0)
    x, y = (torch.randn(16_384, 768, device="cuda", generator=g) for _ in range(2))
    x, y = (torch.nn.functional.normalize(t, dim=1).bfloat16().requires_grad_() for t in (x, y + x))

    def step():
        value = megabatch.clip_loss(x, y, 30.0, workspace=2**30, symmetric=symmetric)
        return value.detach(), *torch.autograd.grad(value, (x, y))

    value, *gradients = step()
    # With one softmax, cuBLAS multiplies them.
    assert launched["stats"] and launched["product"] == 2 * symmetric and not launched["gradient"]
    launched.clear()
    monkeypatch.setattr("megabatch.tiles.fused.hopper.pipeline.pipeline_for", lambda *_: None)
    monkeypatch.setattr("megabatch.tiles.fused.hopper.softmax_backward.fits", lambda *_: False)
    again, *portable = step()
    assert not launched
    assert abs(value / again - 1) < 1e-6
    assert all((a.float() - b.float()).norm() < 3e-3 * b.float().norm() for a, b in zip(gradients, portable, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_give_the_formula(options, everywhere):
    assert_the_formula("clip_loss", options, torch.bfloat16)
    # Forward with label smoothing has only a portable kernel.
    assert bool(everywhere["stats"]) == ("label_smoothing" not in options) and everywhere["gradient"]


@pytest.mark.parametrize("scale", [20.0, 50.0, 300.0])
@pytest.mark.parametrize("options", [{}, {"ids": True}, {"weights": True}, {"symmetric": False, "extra": 7}], ids=str)
def test_int8_is_as_good_as_bf16(options, scale, everywhere):
    case = build("clip_loss", 1000, (scale,), options, width=768).rounded(torch.bfloat16)
    for name, e in errors(case, on_gpu(case, torch.bfloat16, workspace=2**20, int8_backward=True), formula(case)).items():
        # The value, and the gradients of logits that need the fallback, are not computed in int8.
        assert e <= (2e-5 if name == "value" else 5e-3), (name, e)
    assert everywhere["correct"] and everywhere["correct"] == everywhere["gradient"]


def test_large_int8_gradients_have_to_be_computed_again(everywhere, monkeypatch):
    case = build("clip_loss", 1000, (50.0,), {}, width=768).rounded(torch.bfloat16)
    options = {"workspace": 2**20, "int8_backward": True}
    right = errors(case, on_gpu(case, torch.bfloat16, **options), formula(case))
    monkeypatch.setattr("megabatch.tiles.fused.hopper.softmax_backward.correct_large", lambda *_: None)
    wrong = errors(case, on_gpu(case, torch.bfloat16, **options), formula(case))
    assert all(wrong[name] > 1.5 * right[name] for name in ("x", "y"))


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"ids": True, "duplicates": "positive"}, {"drop_above": 0.2}], ids=str
)
def test_options_without_int8_kernels_use_bf16(options, everywhere):
    assert_the_formula("clip_loss", options, torch.bfloat16, int8_backward=True)
    assert not everywhere["correct"]


@pytest.mark.parametrize("options", [{}, {"ids": True, "symmetric": False, "extra": 7}], ids=str)
def test_half_precision_gives_the_formula(options, everywhere):
    assert_the_formula("clip_loss", options, torch.float16)
    assert everywhere["stats"] and not everywhere["gradient"]


@pytest.mark.parametrize(
    "loss, options, dtype",
    [
        ("clip_loss", {"ids": True, "duplicates": "positive"}, torch.bfloat16),
        ("clip_loss", {"drop_above": 0.2}, torch.bfloat16),
        ("siglip_loss", {"ids": True, "duplicates": "positive"}, torch.bfloat16),
        ("siglip_loss", {}, torch.bfloat16),
        ("siglip_loss", {}, torch.float16),
    ],
    ids=str,
)
def test_other_options_use_the_portable_kernels(loss, options, dtype, everywhere):
    assert_the_formula(loss, options, dtype)
    assert not everywhere


@pytest.mark.parametrize("width", [1, 7, 100, 512, 1152])
@pytest.mark.parametrize("rows", [1, 2, 129, 257, 700])
def test_any_shape_is_right_and_every_element_is_written(rows, width, everywhere):
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    try:
        # Centred rows are rounded to bf16 before they are quantised, which needs several entries to average out.
        for scale, int8 in itertools.product((30.0, -30.0), (False, True) if width > 1 else (False,)):
            case = Case("clip_loss", *embeddings(rows, width=width, kind="clustered"), (scale,)).rounded(torch.bfloat16)
            for name, e in errors(case, on_gpu(case, torch.bfloat16, int8_backward=int8), formula(case)).items():
                # int8 is less precise for narrow rows.
                bound = 2e-5 if name == "value" else 1e-2 if not int8 or width > 128 else 3e-2
                assert e <= bound, (int8, name, e)
    finally:
        torch.use_deterministic_algorithms(False)
    assert everywhere["stats"] and everywhere["gradient"] and bool(everywhere["correct"]) == (width > 1)


@pytest.mark.parametrize("gap", [50.0, 1000.0, 1e5])
def test_extreme_logits_are_right(gap, everywhere):
    x, y = embeddings(300, width=16, seed=1)
    x = x * torch.where(torch.arange(300) % 3 == 0, gap, 1.0)[:, None].double()
    y[5:7] *= gap
    case = Case("clip_loss", x, y, (1.0,)).rounded(torch.bfloat16)
    for name, e in errors(case, on_gpu(case, torch.bfloat16), formula(case)).items():
        assert e < 64 * torch.finfo(torch.float32).eps + (0 if name == "value" else 2 * torch.finfo(torch.bfloat16).eps), (name, e)
    assert everywhere["gradient"]


@pytest.mark.parametrize("scale", [20.0, 300.0])
def test_ten_runs_are_bit_equal(scale, everywhere):
    x, y = (t.cuda().bfloat16() for t in embeddings(5000, width=768))
    ids = torch.arange(5000, device="cuda") // 2
    runs = []
    for _ in range(10):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        value = megabatch.clip_loss(a, b, scale, ids=ids, workspace=2**24, label_smoothing=0.1)
        value = value + megabatch.clip_loss(a, b, scale, ids=ids, workspace=2**24, int8_backward=True)
        value.backward()
        runs.append((value.detach(), a.grad, b.grad))
    assert everywhere["stats"] and everywhere["gradient"] and everywhere["correct"]
    assert all(torch.equal(s, t) for run in runs[1:] for s, t in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("width", [512, 768, 1024])
def test_a_large_batch_uses_them_and_agrees_with_the_portable_kernels(width, launched, monkeypatch):
    rows = 30_100
    g = torch.Generator(device="cuda").manual_seed(0)
    x, y = (torch.randn(rows, width, device="cuda", generator=g) for _ in range(2))
    x, y = (torch.nn.functional.normalize(t, dim=1).bfloat16().requires_grad_() for t in (x, y + x))

    def step(**options):
        value = megabatch.clip_loss(x, y, 30.0, workspace=2**29, **options)
        return value.detach(), *torch.autograd.grad(value, (x, y))

    value, *gradients = step()
    assert launched["stats"] and launched["gradient"]
    int8_value, *int8_gradients = step(int8_backward=True)
    assert launched["correct"] and torch.equal(value, int8_value)
    assert all((a.float() - b.float()).norm() < 3e-3 * b.float().norm() for a, b in zip(int8_gradients, gradients, strict=True))
    launched.clear()
    monkeypatch.setattr("megabatch.tiles.fused.hopper.pipeline.pipeline_for", lambda *_: None)
    again, *portable = step()
    assert not launched
    assert abs(value / again - 1) < 1e-6
    assert all((a.float() - b.float()).norm() < 3e-3 * b.float().norm() for a, b in zip(gradients, portable, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_can_be_captured_and_never_waits(everywhere):
    x, y = (t.cuda().bfloat16().requires_grad_() for t in embeddings(1000, width=64))
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)

    def step():
        value = megabatch.clip_loss(x, y, scale) + megabatch.clip_loss(x, y, scale, int8_backward=True)
        return torch.autograd.grad(value, (x, y, scale))

    right = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert everywhere["stats"] and everywhere["gradient"] and everywhere["correct"]
    assert all(torch.equal(a, b) for a, b in zip(captured, right, strict=True))


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_the_sanitizer_finds_nothing(tmp_path):
    script = tmp_path / "small.py"
    script.write_text(
        "import torch, megabatch\n"
        "from megabatch.tiles.fused import gradient_panels\n"
        "from megabatch.tiles.fused.hopper import pipeline\n"
        "tuned, gradient_panels.MIN_WIDTH_TO_SAVE_EXP = pipeline.pipeline_for, {}\n"
        "pipeline.pipeline_for = lambda *args: tuned(*args)._replace(min_tile_pairs=0)\n"
        "x, y = (torch.randn(300, 72, device='cuda', dtype=torch.bfloat16).requires_grad_() for _ in range(2))\n"
        "ids = torch.arange(300, device='cuda') // 2\n"
        "megabatch.clip_loss(x, y, 3.0, ids=ids).backward()\n"
        "megabatch.clip_loss(x, y, 3.0, label_smoothing=0.1, workspace=40_000).backward()\n"
        "megabatch.clip_loss(x / 9, y / 9, 3.0, int8_backward=True, workspace=40_000).backward()\n"
        "from megabatch.tiles.fused.hopper import saved_products\n"
        "gradient_panels.MIN_WIDTH_TO_SAVE_EXP, saved_products.MIN_BUSY = {'bfloat16': 0}, 0\n"
        "x, y = (torch.randn(300, 256, device='cuda', dtype=torch.bfloat16).requires_grad_() for _ in range(2))\n"
        "megabatch.clip_loss(x / 9, y / 9, 3.0, ids=ids).backward()\n"
    )
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0 and "ERROR SUMMARY: 0 errors" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-2000:]
