"""Pairs in tables, JSON lines, folders and saved datasets: what is read, what is refused, and that nothing is lost silently."""

import io
import json
import os
import pickle
import sys

import pytest
from PIL import Image

from megabatch.config import Data
from megabatch.data import BadSample, Sample, open_source


@pytest.fixture
def folder(tmp_path):
    """Return a folder with images red.png and deep/blue.png."""
    (tmp_path / "deep").mkdir()
    Image.new("RGB", (3, 2), "red").save(tmp_path / "red.png")
    Image.new("RGB", (3, 2), "blue").save(tmp_path / "deep" / "blue.png")
    return tmp_path


def put(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def colours(source):
    """Return (colour of x or x itself, y) of every sample in order, or its BadSample."""
    found = []
    for shard, length in enumerate(source.lengths):
        for index in range(length):
            try:
                sample = source.read(shard, index)
                found.append((sample.x if isinstance(sample.x, str) else sample.x.getpixel((0, 0)), sample.y))
            except BadSample as bad:
                assert bad.key
                assert str(bad) == f"{bad.key}: {bad.reason}"
                found.append(bad)
    return found


RED, BLUE = (255, 0, 0), (0, 0, 255)


def table(path, rows):
    """Write rows, the first of which names the columns, in the format of the path's suffix."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        columns = {name: [row[place] for row in rows[1:]] for place, name in enumerate(rows[0])}
        parquet.write_table(pyarrow.table(columns), path)
        return str(path)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    return put(path, "".join(delimiter.join(row) + "\r\n" for row in rows))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_tables_hold_paths_and_captions(folder, suffix):
    rows = [("id", "filepath", "caption"), ("1", "red.png", "a red one"), ("2", "deep/blue.png", "<script>é")]
    source = open_source(Data(source=table(folder / f"t.{suffix}", rows)))
    assert colours(source) == [(RED, "a red one"), (BLUE, "<script>é")]
    assert source.read(0, 1).key == ("t.parquet:2" if suffix == "parquet" else f"t.{suffix}:3")
    assert source.group(0, 1) == "deep/blue.png"
    assert colours(pickle.loads(pickle.dumps(source))) == colours(source)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_tables_hold_text_pairs_where_the_towers_take_texts(tmp_path, suffix):
    path = table(tmp_path / f"t.{suffix}", [("a", "b", "bad"), ("why", "because", "red.png")])
    assert colours(open_source(Data(source=path, x="a", y="b"), x="text")) == [("why", "because")]
    source = open_source(Data(source=path, x="a", y="b", negatives="bad", label="bad"), x="text")
    sample = source.read(0, 0)
    assert (sample.negatives, sample.label) == (("red.png",), "red.png")
    assert source.label(0, 0) == "red.png"


def test_csv_quoting_marks_blank_lines_and_long_fields(folder):
    text = '\ufefffilepath,title\r\nred.png,"two\nlines, ""quoted"""\r\n\r\ndeep/blue.png,' + "x" * 200_000 + "\n"
    source = open_source(Data(source=put(folder / "t.csv", text)))
    assert colours(source) == [(RED, 'two\nlines, "quoted"'), (BLUE, "x" * 200_000)]
    assert [source.read(0, index).key for index in (0, 1)] == ["t.csv:2", "t.csv:5"]


def test_broken_rows_are_bad_samples_with_their_line(folder):
    lines = [
        b"filepath,caption",
        b"red.png,a dog, and a cat",
        b"red.png",
        b"red.png,caf\xe9",
        b"red.png,",
        b"red.png,a\0b",
        b",text",
        b'red.png,"never" closed',
        b"red.png,fine",
        b'red.png,"open',
        b"red.png,lost",
    ]
    source = open_source(Data(source=put(folder / "t.csv", b"\n".join(lines))))
    found = colours(source)
    reasons = [
        "has 3 fields, the first line 2",
        "has 1 fields, the first line 2",
        "caption is not valid UTF-8",
        "caption is empty",
        "NUL",
        "filepath is empty",
        "lines 8 to 8 are not valid CSV",
        None,
    ]
    (damage,) = source.damage
    assert damage.reason.startswith("lines 10 to 11 are not valid CSV")
    assert (damage.read, damage.lost) == (5, 2)
    assert len(found) == len(reasons)
    for line, (entry, reason) in enumerate(zip(found, reasons, strict=True), 2):
        if reason is None:
            assert entry == (RED, "fine")
        else:
            assert entry.key == f"t.csv:{line}"
            assert reason in entry.reason


def test_negatives_in_a_cell_are_a_json_list_or_one_text(tmp_path):
    text = 'query,positive,neg,kind\nq,p,"[""one"", ""two""]",a\nq,p,one,b\nq,p,,b\nq,p,[not json,\n'
    source = open_source(Data(source=put(tmp_path / "t.csv", text), negatives="neg", label="kind"), x="text")
    assert [source.read(0, i).negatives for i in range(3)] == [("one", "two"), ("one",), ()]
    assert [source.label(0, i) for i in range(4)] == ["a", "b", "b", None]
    with pytest.raises(BadSample, match="label is empty"):
        source.read(0, 3)


def test_paths_cannot_leave_the_folder_of_their_table(folder):
    home = folder / "deep"
    (home / "way").symlink_to(folder)
    (home / "link.png").symlink_to(folder / "red.png")
    names = ["../red.png", "way/red.png", "link.png", str(folder / "red.png"), "https://x.org/a.png", "a\0.png", "blue.png"]
    names += [str(home / "blue.png"), "missing.png", "x" * 5000, "."]
    rows = "".join(json.dumps({"image": name, "text": "t"}) + "\n" for name in names)
    found = colours(open_source(Data(source=put(home / "t.jsonl", rows))))
    reasons = ["outside"] * 4 + [
        "is a URL",
        "NUL",
        None,
        None,
        "there is no image",
        "there is no image",
        "there is no image",
    ]
    for name, entry, reason in zip(names, found, reasons, strict=True):
        assert entry == (BLUE, "t") if reason is None else reason in entry.reason, name
    put(home / "t.csv", "image,text\nlink.png,t\nway/red.png,t\n")
    assert all("outside" in bad.reason for bad in colours(open_source(Data(source=str(home / "t.csv")))))


def test_parquet_may_hold_the_images_themselves(folder):
    data = (folder / "red.png").read_bytes()
    rows = [("image", "caption"), ({"bytes": data, "path": None}, "red"), ({"bytes": None, "path": "../x.png"}, "no")]
    first, second = colours(open_source(Data(source=table(folder / "t.parquet", rows))))
    assert first == (RED, "red")
    assert "outside" in second.reason
    plain = table(folder / "u.parquet", [("jpg", "caption"), (data, "red")])
    assert colours(open_source(Data(source=plain))) == [(RED, "red")]


def test_large_images_are_refused(folder):
    path = table(folder / "t.csv", [("path", "text"), ("red.png", "a")])
    assert "3 × 2 pixels" in colours(open_source(Data(source=path, max_pixels=5)))[0].reason
    assert colours(open_source(Data(source=path, max_pixels=6))) == [(RED, "a")]


def test_columns_are_chosen_by_name_or_usual_name(tmp_path):
    path = table(tmp_path / "t.csv", [("Title", "Path", "other"), ("a", "b", "c")])
    assert open_source(Data(source=path)).group(0, 0) == "b"
    for wrong, message in [
        ({"x": "nope"}, "data.x is 'nope', but the columns are Title, Path, other"),
        ({"y": "Path"}, "data.x and data.y are both 'Path'"),
        ({"label": "nope"}, "data.label is 'nope'"),
        ({"negatives": "nope"}, "data.negatives is 'nope'"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_source(Data(source=path, **wrong))
    with pytest.raises(ValueError, match=r"data.x is not given, and none of the columns .* has a usual name \(query"):
        open_source(Data(source=path), x="text")
    with pytest.raises(ValueError, match="negatives are texts, but y is an image"):
        open_source(Data(source=path, x="Title", y="Path", negatives="other"), x="text", y="image")


def test_lines_hold_pairs_with_negatives(tmp_path):
    lines = [{"query": "q", "positive": "p", "negatives": ["m", "n"]}, {"query": "r", "positive": "x" * 10_000, "negatives": "o"}]
    path = put(tmp_path / "a.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, lines)))
    source = open_source(Data(source=path, negatives="negatives", label="positive"), x="text")
    assert source.read(0, 0) == Sample("a.jsonl:1", "q", "p", ("m", "n"), "p")
    assert source.read(0, 1) == Sample("a.jsonl:3", "r", "x" * 10_000, ("o",), "x" * 10_000)
    assert (source.group(0, 1), source.label(0, 0)) == ("r", "p")
    assert colours(pickle.loads(pickle.dumps(source))) == colours(source)
    assert open_source(Data(source=path, negatives=False), x="text").read(0, 0).negatives == ()


def test_broken_lines_are_bad_samples_with_their_number(tmp_path):
    cases = [
        (b"{", "not valid JSON"),
        (b'{"anchor": "a", "document": "b"}', None),
        (b"[1]", "holds a list"),
        (b'{"anchor": "a"}', "document is missing"),
        (b'{"anchor": "\xe9", "document": "b"}', "not valid UTF-8"),
        (b'{"anchor": "\\ud800", "document": "b"}', "not valid UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"anchor": "a", "document": ["b"]}', "document is of type list"),
        (b'{"anchor": "a", "document": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'{"anchor": "a", "docu', "not valid JSON"),
    ]
    source = open_source(Data(source=put(tmp_path / "a.jsonl", b"\n".join(line for line, _ in cases))), x="text")
    for number, (entry, (_, reason)) in enumerate(zip(colours(source), cases, strict=True), 1):
        if reason is None:
            assert entry == ("a", "b")
        else:
            assert entry.key == f"a.jsonl:{number}"
            assert reason in entry.reason
        # A hash of this text decides what is held out.
        assert source.group(0, number - 1).encode("utf-8")
        assert source.label(0, number - 1) is None


def test_several_files_are_several_shards(tmp_path):
    for number in range(3):
        put(tmp_path / f"{number}.jsonl", f'{{"question": "{number}", "answer": "a"}}\n' * (number + 1))
        table(tmp_path / f"{number}.csv", [("question", "answer"), (str(number), "a")])
    for suffix in ("jsonl", "csv"):
        source = open_source(Data(source=str(tmp_path / f"{{2,0,1}}.{suffix}")), x="text")
        assert [source.read(shard, 0).x for shard in range(3)] == ["2", "0", "1"]
    assert open_source(Data(source=str(tmp_path / "*.jsonl")), x="text").lengths == [1, 2, 3]


def test_folders_pair_images_with_texts_of_the_same_name(folder):
    put(folder / "red.txt", "red\n")
    put(folder / "deep" / "blue.caption", "blue")
    put(folder / "orphan.txt", "no image")
    put(folder / ".hidden.png", "")
    source = open_source(Data(source=str(folder)))
    assert source.lengths == [2]
    assert [source.read(0, i).key for i in (0, 1)] == ["deep/blue.png", "red.png"]
    assert colours(source) == [(BLUE, "blue"), (RED, "red")]
    assert source.group(0, 1) == "red"
    assert source.label(0, 0) is None
    assert colours(pickle.loads(pickle.dumps(source))) == colours(source)


def test_folders_name_what_is_missing_unreadable_or_elsewhere(folder):
    outside = folder / "deep"
    home = folder / "home"
    home.mkdir()
    put(outside / "secret.txt", "secret")
    for name in ("a.png", "b.png", "c.png", "d.PNG"):
        put(home / name, (folder / "red.png").read_bytes())
    put(home / "b.txt", "")
    (home / "c.txt").symlink_to(outside / "secret.txt")
    put(home / "d.txt", "a text")
    put(home / "e.png", "no image")
    put(home / "e.txt", "a text")
    (home / "f.png").symlink_to(folder / "red.png")
    put(home / "f.txt", "a text")
    found = colours(open_source(Data(source=str(home))))
    reasons = ["there is no text beside it (a.txt or a.caption)", "text is empty", "outside", None, "is not an image", "outside"]
    for entry, reason in zip(found, reasons, strict=True):
        assert entry == (RED, "a text") if reason is None else reason in entry.reason


def test_saved_datasets_are_read_without_their_library(folder, monkeypatch):
    # Written by the library, so that a change of its layout is noticed.
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = (folder / "red.png").read_bytes()
    features = datasets.Features(
        image=datasets.Image(),
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["cat", "dog"]),
        no=datasets.Sequence(datasets.Value("string")),
    )
    rows = {
        "image": [{"bytes": data, "path": None}, {"bytes": b"broken", "path": None}],
        "text": ["red", "x"],
        "label": [1, 0],
        "no": [["a", "b"], []],
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(str(folder / "one"), num_shards=2)
    datasets.DatasetDict(train=dataset).save_to_disk(str(folder / "some"))
    datasets.DatasetDict(test=dataset, validation=dataset).save_to_disk(str(folder / "others"))
    monkeypatch.setitem(sys.modules, "datasets", None)

    source = open_source(Data(source=str(folder / "one"), label="label", negatives="no"))
    assert source.lengths == [1, 1]
    assert source.read(0, 0)[2:5] == ("red", ("a", "b"), "dog")
    assert source.label(1, 0) == "cat"
    assert source.group(0, 0) != source.group(1, 0)
    assert source.read(0, 0).x.getpixel((0, 0)) == RED
    # Other processes map the files; the data itself is not pickled.
    assert data not in pickle.dumps(source)
    copy = pickle.loads(pickle.dumps(source))
    for opened in (source, copy, open_source(Data(source=str(folder / "some")))):
        first, second = colours(opened)
        assert first == (RED, "red")
        assert "is not an image" in second.reason
    with pytest.raises(ValueError, match="no split 'train', but test, validation; name the folder of one"):
        open_source(Data(source=str(folder / "others")))
    assert open_source(Data(source=str(folder / "others" / "test"))).lengths == [2]


def test_saved_datasets_cannot_name_files_elsewhere(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    for state, message in [
        ({"_data_files": [{"filename": "../x.arrow"}]}, "outside"),
        ({"_data_files": [{"filename": "x.arrow"}]}, "cannot be read as an Arrow file"),
        ({}, "names no data file"),
        ([], "does not hold a JSON object"),
    ]:
        put(home / "state.json", json.dumps(state))
        with pytest.raises(ValueError, match=message):
            open_source(Data(source=str(home)))


def test_sources_that_cannot_be_opened_say_why(folder):
    put(folder / "deep" / "list.jsonl", "[1]\n")
    put(folder / "empty.jsonl", "")
    put(folder / "empty.csv", "")
    put(folder / "header.csv", "image,caption\n")
    put(folder / "quote.csv", 'image,"caption\n')
    put(folder / "utf16.csv", "image,caption\na,b\n".encode("utf-16"))
    put(folder / "broken.parquet", "PAR1")
    put(folder / "a.json", "{}")
    (folder / "bare").mkdir()
    for name, message in [
        ("missing.jsonl", "is not a file"),
        ("missing", "there is no such file or folder"),
        ("a.json", "its name does not show how the pairs are stored; sources are 'glyphs', a folder"),
        ("bare", r"it holds no image \(.jpg"),
        ("empty.jsonl", "no line holds a JSON object"),
        ("deep/list.jsonl", "no line holds a JSON object"),
        ("empty.csv", "first line is empty"),
        ("header.csv", "there is no row"),
        ("quote.csv", "the first line, which names the columns, is not valid CSV"),
        ("utf16.csv", r"none of the columns \\udcff\\udcfei\\x00m"),
        ("broken.parquet", "cannot be read as Parquet"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            open_source(Data(source=str(folder / name)))
        assert name.split("/")[-1] in str(caught.value)
    for kind, name in [
        ("webdataset", "bare"),
        ("table", "a.json"),
        ("folder", "a.json"),
        ("datasets", "bare"),
        ("jsonl", "missing"),
    ]:
        with pytest.raises(ValueError, match=name):
            open_source(Data(source=str(folder / name), kind=kind))
    with pytest.raises(ValueError, match="a folder holds images"):
        open_source(Data(source=str(folder)), x="text")
    with pytest.raises(ValueError, match=r"cannot hold data\.label"):
        open_source(Data(source=str(folder), label="x"))


def test_another_source_is_opened_with_the_same_rules(folder):
    data = Data(source=table(folder / "t.csv", [("a", "b"), ("red.png", "x")]), x="a", y="b")
    other = table(folder / "u.csv", [("a", "b"), ("deep/blue.png", "y")])
    assert colours(open_source(data, other)) == [(BLUE, "y")]


def test_a_missing_package_is_named_with_what_installs_it(folder, monkeypatch):
    path = table(folder / "t.parquet", [("image", "text"), ("red.png", "a")])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow\..* pip install 'megabatch\[data\]'"):
        open_source(Data(source=path))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"needs pillow\..* pip install 'megabatch\[data\]'"):
        open_source(Data())


def test_a_tilde_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    put(folder / "red.txt", "red")
    table(folder / "t.csv", [("path", "text"), ("red.png", "a")])
    assert colours(open_source(Data(source="~/t.csv"))) == [(RED, "a")]
    assert open_source(Data(source="~")).lengths == [2]


def test_a_named_pipe_instead_of_a_text_does_not_block(folder):
    os.mkfifo(folder / "red.txt")
    put(folder / "deep" / "blue.txt", "blue")
    first, second = colours(open_source(Data(source=str(folder))))
    assert first == (BLUE, "blue")
    assert "there is no file 'red.txt'" in second.reason


def test_bytes_in_a_column_are_an_image_and_not_a_path(tmp_path):
    file = io.BytesIO()
    Image.new("L", (2, 2)).save(file, "PNG")
    rows = [("image", "caption"), (file.getvalue(), b"text in bytes")]
    assert colours(open_source(Data(source=table(tmp_path / "t.parquet", rows)))) == [(0, "text in bytes")]
