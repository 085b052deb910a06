"""Rows that share an image or a text are duplicates of each other, in every format and on all ranks."""

import json
import random
import tarfile

import pytest
import torch
from PIL import Image

from megabatch.config import Data
from megabatch.data import open_source
from megabatch.data.duplicates import join_ids
from megabatch.data.loader import Loader
from megabatch.data.sampler import InOrder


def by_definition(x_ids, y_ids):
    """Return the rows that each row reaches by steps to rows with an equal x or y."""
    reached = [{row} for row in range(len(x_ids))]
    for _ in x_ids:
        for rows in reached:
            for row in list(rows):
                rows.update(i for i in range(len(x_ids)) if x_ids[i] == x_ids[row] or y_ids[i] == y_ids[row])
    return reached


@pytest.mark.parametrize("values", [3, 12, 60])
@pytest.mark.parametrize("seed", range(5))
def test_rows_that_share_a_side_directly_or_through_others_get_one_id(values, seed):
    rng = random.Random(f"{values} {seed}")
    x_ids, y_ids = ([rng.randrange(values) for _ in range(24)] for _ in range(2))
    joined = join_ids(torch.tensor(x_ids), torch.tensor(y_ids)).tolist()
    reached = by_definition(x_ids, y_ids)
    for row, own in enumerate(joined):
        assert {i for i, other in enumerate(joined) if other == own} == reached[row]
        assert own == min(y_ids[i] for i in reached[row])


def test_order_and_a_long_chain_do_not_matter():
    # 0-0, 0-1, 1-1, 1-2, …: every row shares a side with the next.
    rows = [((i + 1) // 2, i // 2) for i in range(20_000)]
    random.Random(0).shuffle(rows)
    x_ids, y_ids = torch.tensor(rows).T
    assert join_ids(x_ids, y_ids).unique().tolist() == [0]


def test_ids_stay_those_of_y_where_no_x_occurs_twice():
    y_ids = torch.tensor([2**63 - 1, 5, 5, 0, 9])
    assert torch.equal(join_ids(torch.tensor([4, 3, 2, 1]), y_ids), y_ids)


def test_a_hard_negative_that_is_a_caption_of_the_image_is_its_duplicate():
    # Image 7 has captions 30 and 20; the hard negatives are 30, 40 and 50.
    joined = join_ids(torch.tensor([7, 7, 8]), torch.tensor([30, 20, 40, 30, 40, 50]))
    assert joined.tolist() == [20, 20, 40, 20, 40, 50]


COLOURS = ["red", "lime", "blue"]


@pytest.fixture
def folder(tmp_path):
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (4, 4), colour).save(tmp_path / f"{number}.png")
    return tmp_path


def blank(raw, seed):
    return torch.zeros(1)


def ids_of(source):
    """Return what equal images, and equal captions, of a source's samples in order are numbered by, as small integers."""
    options = {"seed": 0, "workers": 0, "rank": 0, "ranks": 1, "ids": True, "classes": None}
    loader = Loader(source, InOrder(source.lengths), blank, blank, **options)
    (batch,) = loader.batches([(0, sum(source.lengths))])
    assert not batch.bad
    return [ids.unique(return_inverse=True)[1].tolist() for ids in (batch.x_ids, batch.ids)]


def groups(numbers):
    return [numbers.index(number) for number in numbers]


def write(path, rows):
    """Write rows of an image and a caption in the format of the path's suffix."""
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"image": [row[0] for row in rows], "caption": [row[1] for row in rows]}), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"image": image, "caption": caption}) + "\n" for image, caption in rows))
    else:
        path.write_text("image,caption\n" + "".join(f"{image},{caption}\n" for image, caption in rows))
    return str(path)


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.jsonl", "pairs.parquet"])
def test_rows_with_one_image_share_the_id_of_x(folder, name):
    # One file may be named in several ways.
    rows = [("0.png", "a"), ("1.png", "a"), ("./0.png", "b"), ("2.png", "c"), ("0.png", "a")]
    x_ids, y_ids = ids_of(open_source(Data(source=write(folder / name, rows))))
    assert groups(x_ids) == [0, 1, 0, 3, 0]
    assert groups(y_ids) == [0, 0, 2, 3, 0]


def test_images_of_the_same_name_in_other_folders_are_others(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), "red").save(tmp_path / name / "0.png")
        write(tmp_path / name / "pairs.csv", [("0.png", name)])
    x_ids, _ = ids_of(open_source(Data(source=str(tmp_path / "*/pairs.csv"))))
    assert groups(x_ids) == [0, 1]


def test_images_inside_a_table_are_told_apart_by_their_bytes(folder):
    images = [(folder / f"{number}.png").read_bytes() for number in (0, 1, 0)]
    x_ids, _ = ids_of(open_source(Data(source=write(folder / "pairs.parquet", list(zip(images, "abc", strict=True))))))
    assert groups(x_ids) == [0, 1, 0]


def test_images_of_both_sides_are_told_apart(folder):
    path = write(folder / "pairs.csv", [("0.png", "1.png"), ("0.png", "2.png"), ("1.png", "2.png")])
    x_ids, y_ids = ids_of(open_source(Data(source=path, x="image", y="caption"), y="image"))
    assert (groups(x_ids), groups(y_ids)) == ([0, 0, 2], [0, 1, 1])


def test_texts_of_both_sides_are_told_apart(tmp_path):
    path = write(tmp_path / "pairs.csv", [("q", "a"), ("q", "b"), ("r", "b")])
    x_ids, y_ids = ids_of(open_source(Data(source=path, x="image", y="caption"), x="text"))
    assert (groups(x_ids), groups(y_ids)) == ([0, 0, 2], [0, 1, 1])


@pytest.mark.parametrize("shards", [False, True])
def test_folders_and_shards_have_an_image_of_its_own_for_each_text(folder, shards):
    for number in range(3):
        (folder / f"{number}.txt").write_text("one text")
    source = str(folder)
    if shards:
        source = str(folder / "all.tar")
        with tarfile.open(source, "w") as tar:
            for number in range(3):
                tar.add(folder / f"{number}.png", f"{number}.png")
                tar.add(folder / f"{number}.txt", f"{number}.txt")
    x_ids, y_ids = ids_of(open_source(Data(source=source)))
    assert (groups(x_ids), groups(y_ids)) == ([0, 1, 2], [0, 0, 0])


def test_shards_of_the_same_name_in_other_folders_hold_other_images(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / f"{name}.txt").write_text(f"the text of {name}")
        with tarfile.open(folder / name / "all.tar", "w") as tar:
            tar.add(folder / "0.png", "0.png")
            tar.add(folder / f"{name}.txt", "0.txt")
    x_ids, _ = ids_of(open_source(Data(source=str(folder / "*/all.tar"))))
    assert groups(x_ids) == [0, 1]
