"""Data files that are truncated, corrupted or unreadable: always reported, never a crash, never silently less data."""

import io
import json
import os
import signal
import tarfile

import pytest
from PIL import Image

from megabatch.config import Data
from megabatch.data import BadSample, open_source
from megabatch.data.sampler import split


def image():
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    return file.getvalue()


def shard(path, numbers, options="w"):
    with tarfile.open(path, options) as tar:
        for number in numbers:
            for name, data in ((f"{number:03d}.png", image()), (f"{number:03d}.txt", f"text {number}".encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def readable(source):
    """Return how many samples can be read; all others must be bad samples."""
    count = 0
    for place, length in enumerate(source.lengths):
        for index in range(length):
            source.group(place, index)
            source.label(place, index)
            try:
                source.read(place, index)
                count += 1
            except BadSample as bad:
                assert bad.key and bad.reason
    return count


# A sample takes four blocks of 512 bytes.
SAMPLE = 4 * 512


def test_samples_behind_a_broken_header_are_counted_as_lost(tmp_path):
    path = shard(tmp_path / "a.tar", range(40))
    data = bytearray(path.read_bytes())
    data[2 * SAMPLE + 5] ^= 0xFF
    # The data of a lost sample contains the magic word of a header.
    data[20 * SAMPLE + 512 + 257 : 20 * SAMPLE + 512 + 262] = b"ustar"
    path.write_bytes(data)
    shard(tmp_path / "b.tar", range(100, 130))
    source = open_source(Data(source=str(tmp_path / "*.tar")))
    assert source.lengths == [2, 30] and readable(source) == 32
    (damage,) = source.damage
    assert (damage.file, damage.read, damage.lost, damage.usual, damage.counted) == ("a.tar", 2, 38, 30, 38)
    assert "2 samples can be read, at least 38 are lost" in str(damage) and "% of the file is not read" in str(damage)


def test_several_broken_places_are_counted_together(tmp_path):
    path = shard(tmp_path / "a.tar", range(40))
    data = bytearray(path.read_bytes())
    for sample in (10, 20, 30):
        # Both headers of the sample: its name is lost.
        data[sample * SAMPLE] ^= 1
        data[sample * SAMPLE + 1024] ^= 1
    path.write_bytes(data)
    (damage,) = open_source(Data(source=str(path))).damage
    assert (damage.read, damage.lost) == (10, 27)


def test_a_truncated_shard_names_the_cut_sample_and_the_size_of_other_shards(tmp_path):
    path = shard(tmp_path / "a.tar", range(40))
    path.write_bytes(path.read_bytes()[: 3 * SAMPLE + 520])
    for name in "bcd":
        shard(tmp_path / f"{name}.tar", range(20))
    (damage,) = open_source(Data(source=str(tmp_path / "*.tar"))).damage
    assert (damage.read, damage.lost, damage.usual) == (3, 1, 20)
    assert "undamaged files hold 20" in str(damage)


def test_both_parts_of_a_split_report_the_damage(tmp_path):
    path = shard(tmp_path / "a.tar", range(20))
    path.write_bytes(path.read_bytes()[: 15 * SAMPLE])
    for part in split(open_source(Data(source=str(path))), 0.3):
        assert [damage.file for damage in part.damage] == ["a.tar"]


def test_undamaged_files_have_no_damage(tmp_path):
    shard(tmp_path / "a.tar", range(3))
    shard(tmp_path / "b.tar", range(3))
    (tmp_path / "a.jsonl").write_text('{"query": "q", "positive": "p"}\n{"query": "r", "positive": "p"}')
    (tmp_path / "a.csv").write_text('query,positive\nq,"two\nlines"\nr,p')
    for source in (
        open_source(Data(source=str(tmp_path / "*.tar"))),
        open_source(Data(source=str(tmp_path / "a.jsonl")), x="text"),
        open_source(Data(source=str(tmp_path / "a.csv")), x="text"),
        open_source(Data()),
    ):
        assert list(source.damage) == []


def test_a_json_file_that_ends_in_the_middle_of_a_line_is_damage(tmp_path):
    lines = [json.dumps({"query": f"q{i}", "positive": "p"}) for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines)[:-3])
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n" + "\0" * 50)
    (tmp_path / "c.jsonl").write_text("")
    source = open_source(Data(source=str(tmp_path / "*.jsonl")), x="text")
    assert [(damage.file, damage.read) for damage in source.damage] == [("a.jsonl", 4), ("b.jsonl", 5), ("c.jsonl", 0)]
    assert "line 5 has no end" in source.damage[0].reason and "the file is empty" in source.damage[2].reason


def test_lines_that_a_stray_quote_swallows_are_counted_as_lost(tmp_path):
    rows = [f"q{i},p{i}" for i in range(50)]
    rows[10] = '"q10,p10'
    (tmp_path / "a.csv").write_text("query,positive\n" + "\n".join(rows) + "\n")
    source = open_source(Data(source=str(tmp_path / "a.csv")), x="text")
    (damage,) = source.damage
    assert source.lengths == [10]
    assert (damage.read, damage.lost) == (10, 40)
    assert damage.reason.startswith("lines 12 to 51 are not valid CSV")


# Arrow and Parquet


def rows_of(count):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.table(
        {
            "image": pyarrow.array(
                [{"bytes": b"abc" * i, "path": None if i % 2 else f"p{i}"} for i in range(count)],
                pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]),
            ),
            "query": [f"é {i}" for i in range(count)],
            "positive": [f"text {i}" for i in range(count)],
            "no": [["a", "b"][: i % 3] for i in range(count)],
            "kind": pyarrow.array([f"kind {i % 3}" for i in range(count)]).dictionary_encode(),
        }
    )


def saved(folder, table, rows):
    """Write a dataset like Dataset.save_to_disk, with the given number of rows per record batch."""
    from pyarrow import ipc

    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    ends = []
    with (folder / "data.arrow").open("wb") as file, ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)
            ends.append(file.tell())
    return folder / "data.arrow", ends


TEXTS = {"x": "query", "y": "positive", "negatives": "no", "label": "kind"}


def in_child(work):
    """Return the exit status of a process that does the work; a negative number is the signal that ended it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            # A crash fails the test by its status; its traceback need not be printed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(120)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def flips(path, source, every, **options):
    """Read the source with one byte of the file flipped, for every n-th byte. Only a ValueError may be raised."""
    whole = path.read_bytes()
    for place in range(0, len(whole), every):
        data = bytearray(whole)
        data[place] ^= (0x01, 0x80, 0xFF)[place % 3]
        path.write_bytes(data)
        try:
            opened = open_source(Data(source=str(source), **options), x="text" if options["x"] == "query" else "image")
            assert sum(opened.lengths) <= 12
            readable(opened)
        except ValueError:
            continue


# The slow cases flip every byte.
EVERY = [17, pytest.param(1, marks=pytest.mark.soak)]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("options", [TEXTS, TEXTS | {"x": "image"}], ids=["texts", "nested"])
def test_a_flipped_byte_of_an_arrow_file_does_not_end_the_process(tmp_path, options, every):
    path, _ = saved(tmp_path / "set", rows_of(12), 6)
    assert in_child(lambda: flips(path, tmp_path / "set", every, **options)) == 0


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("codec", ["snappy", "none"])
def test_a_flipped_byte_of_a_parquet_file_does_not_end_the_process(tmp_path, codec, every):
    table = rows_of(12)
    from pyarrow import parquet

    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=6, compression=codec)
    assert in_child(lambda: flips(tmp_path / "t.parquet", tmp_path / "t.parquet", every, **TEXTS)) == 0


def test_damaged_offsets_affect_few_rows_and_only_when_they_are_read(tmp_path):
    path, _ = saved(tmp_path / "set", rows_of(20), 10)
    data = path.read_bytes()
    # The offsets of "positive" in the second batch: int32, starting at 0, with seven letters per text.
    at = data.rindex(b"".join((7 * i).to_bytes(4, "little") for i in range(11)))
    path.write_bytes(data[: at + 4 * 4] + (2**30).to_bytes(4, "little") + data[at + 5 * 4 :])
    source = open_source(Data(source=str(tmp_path / "set"), **TEXTS), x="text")
    assert source.lengths == [20]
    assert in_child(lambda: readable(source)) == 0
    # The damaged offset ends one text and begins the next.
    assert readable(source) == 18
    with pytest.raises(BadSample, match="positive is damaged"):
        source.read(0, 13)


def test_one_text_that_is_not_utf8_is_one_bad_sample_of_an_arrow_file(tmp_path):
    path, _ = saved(tmp_path / "set", rows_of(20), 10)
    path.write_bytes(path.read_bytes().replace(b"text 13", b"text \xff\xfe"))
    source = open_source(Data(source=str(tmp_path / "set"), **TEXTS), x="text")
    assert readable(source) == 19
    with pytest.raises(BadSample, match="positive is not valid UTF-8"):
        source.read(0, 13)


def test_an_arrow_file_truncated_between_batches_is_damage(tmp_path):
    path, ends = saved(tmp_path / "set", rows_of(30), 10)
    data = path.read_bytes()
    for cut, reason, rows in [(ends[0], "the end mark is missing", 10), (ends[1] + 40, "cut off", 20)]:
        path.write_bytes(data[:cut])
        source = open_source(Data(source=str(tmp_path / "set"), **TEXTS), x="text")
        assert source.lengths == [rows] and readable(source) == rows
        (damage,) = source.damage
        assert reason in damage.reason and damage.read == rows
    path.write_bytes(data + data)
    (damage,) = open_source(Data(source=str(tmp_path / "set"), **TEXTS), x="text").damage
    assert "more data follows the end mark" in damage.reason


def test_an_arrow_file_that_shrinks_while_it_is_used_makes_bad_samples(tmp_path):
    path, _ = saved(tmp_path / "set", rows_of(12), 6)
    source = open_source(Data(source=str(tmp_path / "set"), **TEXTS), x="text")

    def shrink():
        assert readable(source) == 12
        os.truncate(path, 0)
        assert readable(source) == 0

    assert in_child(shrink) == 0


# Folders


def unreadable(monkeypatch, folder):
    """Make the folder impossible to list; permissions would not stop root."""
    plain = os.scandir

    def scandir(path="."):
        if os.path.abspath(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(image())
        (tmp_path / name / "1.txt").write_text("one")
    assert open_source(Data(source=str(tmp_path))).lengths == [2]
    for folder in (tmp_path / "b", tmp_path):
        with monkeypatch.context() as patch:
            unreadable(patch, folder)
            with pytest.raises(ValueError, match=rf"folder '{folder}' cannot be read \(Permission denied\)"):
                open_source(Data(source=str(tmp_path)))


@pytest.mark.parametrize("pattern", ["*/s-*.tar", "**/s-*.tar", "{a,b}/s-*.tar"])
def test_a_glob_over_a_folder_that_cannot_be_listed_is_an_error_that_names_it(tmp_path, monkeypatch, pattern):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shard(tmp_path / name / "s-0.tar", range(2))
    assert open_source(Data(source=str(tmp_path / pattern))).lengths == [2, 2]
    unreadable(monkeypatch, tmp_path / "b")
    with pytest.raises(ValueError, match=r"/b/?' cannot be read \(Permission denied\)"):
        open_source(Data(source=str(tmp_path / pattern)))


def test_linked_folders_that_are_not_followed_are_reported(tmp_path):
    home, other = tmp_path / "home", tmp_path / "other"
    for folder in (home / "inside", other):
        folder.mkdir(parents=True)
        (folder / "1.png").write_bytes(image())
        (folder / "1.txt").write_text("one")
    (home / "outside").symlink_to(other)
    (home / "again").symlink_to(home / "inside")
    source = open_source(Data(source=str(home)))
    assert source.lengths == [1]
    (damage,) = source.damage
    assert damage.file == "outside" and "link to a folder outside" in damage.reason


def test_a_file_in_a_folder_that_cannot_be_entered_is_not_said_to_be_missing(tmp_path, monkeypatch):
    path, plain = shard(tmp_path / "a.tar", range(2)), os.stat

    def stat(name, *args, **options):
        if name == str(path):
            raise PermissionError(13, "Permission denied", name)
        return plain(name, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(ValueError, match=r"a.tar' cannot be read \(Permission denied\)"):
        open_source(Data(source=str(path)))


# Hard negatives


def negatives_file(folder, kind, columns):
    rows = [{"query": f"q{i}", "positive": f"p{i}", **{name: ["n"] for name in columns}} for i in range(3)]
    path = folder / f"pairs.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        lines = [",".join(rows[0])] + [f"q{i},p{i}" + ',"[""n""]"' * len(columns) for i in range(3)]
        path.write_text("\n".join(lines))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("columns", [["negatives"], ["Negative"], ["neg"], ["hard_negatives"], ["negative_1", "negative_2"]])
def test_columns_of_hard_negatives_need_a_decision_of_the_run(tmp_path, kind, columns):
    path = negatives_file(tmp_path, kind, columns)
    joined = ";".join(columns)
    with pytest.raises(ValueError, match=rf'data\.negatives="{joined}" to train with .* or data\.negatives=false'):
        open_source(Data(source=path), x="text")
    assert open_source(Data(source=path, negatives=False), x="text").read(0, 0).negatives == ()
    assert open_source(Data(source=path, negatives=joined), x="text").read(0, 0).negatives == ("n",) * len(columns)


def test_columns_in_use_and_other_names_are_not_hard_negatives(tmp_path):
    path = negatives_file(tmp_path, "jsonl", ["negation", "negative_score"])
    assert open_source(Data(source=path), x="text").lengths == [3]
    path = negatives_file(tmp_path, "csv", ["negative"])
    assert open_source(Data(source=path, y="negative"), x="text").read(0, 0).y == '["n"]'
    with pytest.raises(ValueError, match=r"data.negatives is 'negative;nope', but the columns are"):
        open_source(Data(source=path, negatives="negative;nope"), x="text")
