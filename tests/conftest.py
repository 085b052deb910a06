"""What all tests share: OpenCLIP beside a CPU torch, kernels without a GPU, and a world of worker processes."""

import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Workers share the processors: more threads than there are wait for each other, and take twice the time. torch reads this when it
# is imported, and so do the processes that tests start.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch

# Triton reads this when a kernel is declared, which is when the fused tiles are first imported; worker processes inherit it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        import quick_interpreter

        quick_interpreter.install()

from world import World

from benchmarks.peers import declare_torchvision_schemas

declare_torchvision_schemas()

# They come first, so that no worker is left with one of them when the others have nothing to do.
LONGEST = (
    "test_fused",
    "test_fused_matryoshka",
    "test_verbs",
    "test_sentence_transformers_trainer",
    "test_tiles",
    "test_lightning",
    "test_train",
    "test_killed_ranks",
    "test_interrupted",
    "test_transformers_trainer",
    "test_infonce_memory",
    "test_sweep_runs",
    "test_study_fit",
    "test_maxsim_fused",
    "test_benchmarks",
    "test_example_scripts",
    "test_noise_run",
    "test_loss_memory",
    "test_fit_run",
    "test_hopper_on_cpu",
    "test_sentence_transformers",
    "test_benchmarks_encoders",
    "test_other_losses",
    "test_study",
    "test_attention",
    "test_fused_one_piece",
    "test_run_folder",
    "test_other_systems",
    "test_architecture",
    "test_fit_finder",
)


@pytest.fixture
def without_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules be those of published trainings alone, whether or not the package has a measured law of batches."""
    monkeypatch.setattr("megabatch.batch_law.LAW_FILE", tmp_path / "no law")


# Before the selection by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    mark_samples(items)


def mark_samples(items: list[pytest.Item]) -> None:
    """Mark all but every n-th case of a parametrized test as slow, where the test has the mark sampled(n)."""
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            test = item.path, getattr(item, "originalname", item.name)
            if cases[test] % mark.args[0]:
                item.add_marker("slow")
            cases[test] += 1


@pytest.fixture
def unwritten_memory_is_no_number() -> Iterator[None]:
    """On a CPU, what nothing has written yet is NaN, or the largest integer, and shows in every sum."""
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    processes = World()
    yield processes
    processes.close()


@pytest.fixture
def tiles_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute small batches by tiles too, as large ones are."""
    from megabatch.losses import one_piece

    monkeypatch.setattr(one_piece, "one_piece_for", lambda tiles, device: None)
    one_piece.plan_for.cache_clear()
    yield
    one_piece.plan_for.cache_clear()
