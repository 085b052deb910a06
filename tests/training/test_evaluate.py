"""Recall, nearest neighbours and zero-shot accuracy against sorting the whole similarity matrix."""

from __future__ import annotations

import pytest
import torch
from heap import MIB, measured
from torch import Tensor
from torch.nn.functional import normalize

from megabatch.recall import chance
from megabatch.training.evaluate import Retrieval, _keys, class_embeddings, nearest, retrieval, zero_shot

TINY = 64


def integers(rows: int, width: int, seed: int = 0) -> Tensor:
    """Return embeddings whose dot products are exact in any order of summation, and often equal."""
    return torch.randint(-2, 3, (rows, width), generator=torch.Generator().manual_seed(seed)).float()


def brute_force(x: Tensor, y: Tensor, ids: Tensor | tuple[Tensor, Tensor] | None) -> Retrieval:
    """Return ranks by the definition: sort the best partner and all that are no partners, with the partner last among equals."""
    ids = torch.arange(len(x)) if ids is None else ids
    x_ids, y_ids = (side.tolist() for side in (ids if isinstance(ids, tuple) else (ids, ids)))
    places = []
    for z, own, others in ((x @ y.T, x_ids, y_ids), ((x @ y.T).T, y_ids, x_ids)):
        places.append([])
        for row, number in zip(z.tolist(), own, strict=True):
            best = max(value for value, other in zip(row, others, strict=True) if other == number)
            answers = sorted((-value, False) for value, other in zip(row, others, strict=True) if other != number)
            places[-1].append(sorted([*answers, (-best, True)]).index((-best, True)) + 1)
    recall = [{k: sum(p <= k for p in side) / len(side) for k in (1, 5, 10)} for side in places]
    return Retrieval(max(len(x), len(y)), *recall, *(torch.tensor(side).double().quantile(0.5).item() for side in places))


def same(a: Retrieval, b: Retrieval) -> bool:
    shares = all(a[i] == pytest.approx(b[i], abs=1e-6) for i in (1, 2))
    return shares and (a.pairs, a.x_median_rank, a.y_median_rank) == (b.pairs, b.x_median_rank, b.y_median_rank)


@pytest.mark.parametrize("workspace", [None, 4096, TINY])
@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 37])
def test_recall_and_median_rank_are_those_of_a_sort(rows, duplicates, workspace):
    x, y = integers(rows, 6), integers(rows, 6, seed=1)
    y[rows // 2 :] = x[rows // 2 :] * 3
    ids = torch.arange(rows) // 3 if duplicates else None
    expected = brute_force(x, y, ids)
    assert rows < 3 or 0 < expected.x_to_y[1] < expected.x_to_y[10] < 1
    assert same(retrieval(x, y, ids=ids, workspace=workspace), expected)


# Triton's interpreter uses numpy, which warns about overflows that a GPU computes silently.
@pytest.mark.filterwarnings(r"ignore:(overflow|divide by zero|invalid value) encountered in:RuntimeWarning")
def test_the_fused_tiles_rank_as_a_sort_does():
    pytest.importorskip("triton", reason="the fused tiles need Triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y, ids = integers(40, 16), integers(40, 16, seed=1), torch.arange(40) // 3
    collapsed = torch.full((40, 16), 0.3, device=device)
    assert same(retrieval(x.to(device), y.to(device), ids=ids, backend="fused"), brute_force(x, y, ids))
    assert retrieval(collapsed, collapsed, backend="fused").x_to_y[10] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recall_is_that_of_a_sort_in_every_dtype(dtype):
    x, y = (integers(40, 5, seed).to(dtype) for seed in (2, 3))
    assert same(retrieval(x, y), brute_force(x.float(), y.float(), None))


@pytest.mark.parametrize("width", [3, 64, 1000])
@pytest.mark.parametrize("workspace", [None, TINY])
def test_a_collapsed_model_finds_nothing_whatever_the_tile(width, workspace):
    row = normalize(torch.randn(1, width, generator=torch.Generator().manual_seed(0)), dim=1)
    # Summation in another order rounds differently: with small tiles, the partner's similarity differs from equal ones.
    found = retrieval(row.repeat(30, 1), row.repeat(30, 1), workspace=workspace)
    assert found.x_to_y == found.y_to_x == {1: 0, 5: 0, 10: 0}
    assert found.x_median_rank == found.y_median_rank == 30


def test_a_perfect_model_finds_everything():
    found = retrieval(torch.eye(30), torch.eye(30), workspace=TINY)
    assert found == Retrieval(30, {1: 1, 5: 1, 10: 1}, {1: 1, 5: 1, 10: 1}, 1, 1)
    assert found.as_json()["y_to_x"] == {"1": 1, "5": 1, "10": 1}


def test_the_median_of_two_ranks_lies_between_them():
    found = retrieval(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [1.0]]))
    assert (found.x_to_y[1], found.x_median_rank) == (0.5, 1.5)


def test_one_pair_is_found_and_so_says_chance():
    assert retrieval(torch.ones(1, 4), torch.ones(1, 4)).x_to_y == chance(1) == {1: 1, 5: 1, 10: 1}
    assert chance(1000) == {1: 0.001, 5: 0.005, 10: 0.01}


def test_random_embeddings_are_at_chance():
    x, y = (torch.randn(2000, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = retrieval(x, y)
    # Ten standard deviations of a fraction of 10 / 2000.
    assert found.x_to_y[10] == pytest.approx(chance(2000)[10], abs=10 * (0.005 / 2000) ** 0.5)
    assert 800 < found.x_median_rank < 1200


def test_copies_of_an_image_are_no_rivals_and_one_of_its_captions_is_enough():
    # One image with two captions, the second of which resembles another image's caption more.
    images = torch.tensor([[1.0, 0], [1, 0], [0, 1]])
    captions = torch.tensor([[1.0, 0.1], [0.2, 1], [0.5, 0.9]])
    ids = torch.tensor([7, 7, 9])
    found = retrieval(images, captions, ids=ids)
    # Both copies of the image find its first caption; the third image finds the second caption of the other one.
    assert found.x_to_y[1] == pytest.approx(2 / 3)
    assert retrieval(images, captions).y_to_x[1] < found.y_to_x[1]


@pytest.mark.parametrize("workspace", [None, 4096, TINY])
@pytest.mark.parametrize("images", [12, 60])
def test_sides_of_different_lengths_are_ranked_by_their_ids(images, workspace):
    texts = 90
    # Between one and many captions for each image, in any order.
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(2))
    owners, y_ids = (torch.arange(texts) ** 2 % images)[order].unique(return_inverse=True)
    x_ids = torch.arange(len(owners)).flip(0)
    x = integers(len(owners), 6)
    y = integers(texts, 6, seed=1) + x.flip(0)[y_ids]
    expected = brute_force(x, y, (x_ids, y_ids))
    assert expected.x_to_y[1] > 0 and 0 < expected.y_to_x[1] < 1
    assert same(retrieval(x, y, ids=(x_ids, y_ids), workspace=workspace), expected)


def test_copies_count_among_the_rivals_unless_each_item_is_given_once():
    # Image 0 has five captions. The caption of image 1 resembles image 0 more.
    x, y = torch.eye(2), torch.tensor([[1.0, 0]] * 5 + [[1.0, 0.5]])
    ids = torch.tensor([0, 0, 0, 0, 0, 1])
    assert retrieval(x[ids], y, ids=ids).y_median_rank == retrieval(x, y, ids=(torch.arange(2), ids)).y_median_rank == 1
    assert retrieval(x[ids], y, ids=ids).y_to_x[5] == pytest.approx(5 / 6)
    assert retrieval(x, y, ids=(torch.arange(2), ids)).y_to_x[5] == 1


def test_autocast_does_not_round_the_similarities():
    x, y = (torch.randn(300, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    y = x + 0.7 * y
    expected = brute_force(x, y, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(retrieval(x, y), expected)
        assert torch.equal(nearest(x, y, 3)[1], (x.double() @ y.double().T).topk(3).indices)


@pytest.mark.parametrize("where", ["x", "y"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_diverged_is_refused_instead_of_looking_perfect(where, value):
    both = {"x": torch.ones(4, 3), "y": torch.ones(4, 3)}
    both[where][2, 1] = value
    with pytest.raises(ValueError, match="not finite"):
        retrieval(**both)
    with pytest.raises(ValueError, match="not finite"):
        nearest(both["x"], both["y"], 1)
    with pytest.raises(ValueError, match="not finite"):
        zero_shot(both["x"], both["y"], torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("workspace", [2**20, 4096, TINY])
@pytest.mark.parametrize("k", [1, 4, 40])
def test_nearest_is_a_stable_sort_of_the_whole_matrix(k, workspace):
    queries, documents = integers(23, 4), integers(40, 4, seed=1)
    z = queries @ documents.T
    scores, indices = nearest(queries, documents, k, workspace=workspace)
    expected = z.sort(dim=1, descending=True, stable=True)
    assert torch.equal(indices, expected.indices[:, :k])
    assert torch.equal(scores, expected.values[:, :k])


def test_nearest_agrees_with_topk():
    queries, documents = (torch.randn(300, 32, generator=torch.Generator().manual_seed(seed)).double() for seed in (0, 1))
    scores, indices = nearest(queries.float(), documents.float(), 10, workspace=50_000)
    expected = (queries @ documents.T).topk(10)
    assert torch.equal(indices, expected.indices)
    # Similarities are below 32, where fp32 numbers are 2e-6 apart, and sum up 32 products.
    assert torch.allclose(scores.double(), expected.values, rtol=0, atol=32 * 2e-6)


def test_the_two_zeros_are_equal():
    keys = _keys(torch.tensor([[-0.0, 0.0, -0.0, -1e-45]]), start=5)
    assert (keys.sort(descending=True).indices == torch.arange(4)).all()


def test_no_queries_have_no_answers():
    scores, indices = nearest(torch.empty(0, 4), torch.ones(5, 4), 2)
    assert scores.shape == indices.shape == (0, 2)


@pytest.mark.parametrize("k", [0, 6])
def test_more_answers_than_documents_are_refused(k):
    with pytest.raises(ValueError, match="at most 5"):
        nearest(torch.ones(1, 4), torch.ones(5, 4), k)


@pytest.mark.parametrize(
    ("problem", "call"),
    [
        ("must be pairs", lambda: retrieval(torch.ones(3, 2), torch.ones(4, 2))),
        ("must be pairs", lambda: retrieval(torch.ones(0, 2), torch.ones(0, 2))),
        ("width 2 .* 3", lambda: retrieval(torch.ones(3, 2), torch.ones(3, 3))),
        ("must be one integer", lambda: retrieval(torch.ones(3, 2), torch.ones(3, 2), ids=torch.ones(3))),
        ("must be one integer .* 4 rows", lambda: retrieval(torch.ones(3, 2), torch.ones(4, 2), ids=(torch.arange(3),) * 2)),
        ("1 rows have an id", lambda: retrieval(torch.ones(3, 2), torch.ones(2, 2), ids=(torch.arange(3), torch.arange(2)))),
        ("workspace=0", lambda: retrieval(torch.ones(3, 2), torch.ones(3, 2), workspace=0)),
        ("workspace=-1", lambda: nearest(torch.ones(3, 2), torch.ones(3, 2), 1, workspace=-1)),
        ("must be floating-point", lambda: nearest(torch.ones(3), torch.ones(3, 2), 1)),
        ("between 0 and 1", lambda: zero_shot(torch.ones(1, 2), torch.ones(2, 2), torch.tensor([2]))),
        ("must be one integer", lambda: zero_shot(torch.ones(1, 2), torch.ones(2, 2), torch.ones(1))),
        ("must hold {}", lambda: class_embeddings(lambda texts: torch.ones(len(texts), 2), ["a"], ["a photo"])),
        ("0 names", lambda: class_embeddings(lambda texts: torch.ones(len(texts), 2), [])),
    ],
)
def test_what_cannot_be_evaluated_is_named(problem, call):
    with pytest.raises(ValueError, match=problem):
        call()


def test_zero_shot_accuracy_is_the_share_of_classes_found():
    classes = torch.eye(6)
    images = classes[[0, 1, 2, 3]] + 2 * classes[[0, 2, 2, 4]] + 1.5 * classes[[1, 3, 3, 5]]
    assert zero_shot(images, classes, torch.tensor([0, 1, 2, 3]), k=(1, 2, 3)) == {1: 0.5, 2: 0.5, 3: 1}


def test_classes_that_look_alike_are_not_told_apart_by_luck():
    g = torch.Generator().manual_seed(0)
    row = normalize(torch.randn(1, 999, generator=g), dim=1)
    # These classes differ by less than the rounding of a similarity.
    classes = row + 1e-7 * normalize(torch.randn(9, 999, generator=g), dim=1)
    assert zero_shot(row.repeat(50, 1), classes, torch.arange(50) % 9) == {1: 0, 5: 0}


def test_a_class_is_the_mean_of_its_templates_each_of_norm_one():
    table = {"a cat": [3.0, 0], "{x} cat": [0, 1], "a {dog}": [0, -1], "{x} {dog}": [0, -5]}
    found = class_embeddings(lambda texts: torch.tensor([table[t] for t in texts]), ["cat", "{dog}"], ["a {}", "{x} {}"])
    assert torch.allclose(found, torch.tensor([[0.5**0.5, 0.5**0.5], [0, -1]]))


def evaluated(rows: int) -> None:
    x, y = torch.randn(2, rows, 16).unbind()
    retrieval(x, y, ids=torch.arange(rows) // 2, workspace=2 * MIB)
    nearest(x[: rows // 10], y, 5, workspace=2 * MIB)


def test_the_matrix_is_never_there():
    rows = 5_000
    peak = measured(evaluated, (64,), (rows,))
    # The matrix would be 95 MiB. Allocated are the embeddings, fewer than twenty numbers per row, and about twice the working
    # memory.
    assert peak < rows * 4 * (2 * 16 + 20) + 2 * 2 * MIB + 4 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_million_by_a_million_on_a_device():
    rows, device = 2**20, torch.device("cuda")
    g = torch.Generator(device).manual_seed(0)
    x, y = torch.randn(2, rows, 64, generator=g, device=device).bfloat16().unbind()
    # Every second row finds its partner, the others do not.
    y = torch.where(torch.arange(rows, device=device)[:, None] % 2 == 0, x, y).contiguous()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = retrieval(x, y)
    scores, indices = nearest(x[:100], y, 5)
    torch.cuda.synchronize()
    assert found.x_to_y[1] == pytest.approx(0.5, abs=1e-3)
    assert found.y_to_x[10] == pytest.approx(0.5, abs=1e-3)
    assert torch.equal(indices[::2, 0].cpu(), torch.arange(0, 100, 2))
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    # The matrix in fp32 would be 4 TiB.
    assert torch.cuda.max_memory_allocated() - before < 2**31
