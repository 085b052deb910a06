"""WebDataset shards: every member is found, nothing is unpacked, and damage is reported."""

import io
import json
import pickle
import tarfile

import pytest
from PIL import Image

from megabatch.config import Data
from megabatch.data import BadSample, open_source


def image(shade=0):
    file = io.BytesIO()
    Image.new("L", (8, 8), shade).save(file, "PNG")
    return file.getvalue()


def write(path, members, **options):
    """Write a tar file of (name, bytes); a TarInfo instead of a name is written unchanged."""
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def pairs(names, shade=0):
    return [member for name in names for member in ((f"{name}.png", image(shade)), (f"{name}.txt", f"text {name}".encode()))]


def link(name, kind):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info, b""


def captions(source):
    """Return y of every sample in order, or its BadSample."""
    found = []
    for shard, length in enumerate(source.lengths):
        for index in range(length):
            try:
                found.append(source.read(shard, index).y)
            except BadSample as bad:
                found.append(bad)
    return found


def test_members_of_one_name_are_one_sample(tmp_path):
    path = write(tmp_path / "a.tar", pairs(["000", "dir.x/001"], shade=7))
    source = open_source(Data(source=path))
    assert source.lengths == [2]
    sample = source.read(0, 1)
    assert (sample.key, sample.y, sample.x.getpixel((0, 0))) == ("a.tar/dir.x/001", "text dir.x/001", 7)
    assert source.group(0, 0) != source.group(0, 1)
    assert source.label(0, 0) is None


def test_order_of_members_and_other_members_do_not_matter(tmp_path):
    members = [
        ("2.txt", b"two"),
        ("1.png", image()),
        ("README.md", b"hello"),
        ("2.PNG", image()),
        ("1.txt", b"one"),
        ("1.npy", b""),
    ]
    assert captions(open_source(Data(source=write(tmp_path / "a.tar", members)))) == ["two", "one"]


def test_globs_and_braces_name_shards(tmp_path):
    for number in range(8, 12):
        write(tmp_path / f"s-{number:03d}.tar", pairs([f"n{number}"]))
    cases = {
        "s-{008..010}.tar": ["text n8", "text n9", "text n10"],
        "s-0{11,08}.tar": ["text n11", "text n8"],
        "s-*.tar": ["text n8", "text n9", "text n10", "text n11"],
        "s-{00[89],010}.tar": ["text n8", "text n9", "text n10"],
    }
    for pattern, wanted in cases.items():
        assert captions(open_source(Data(source=str(tmp_path / pattern)))) == wanted, pattern
    for pattern in ("s-{010..013}.tar", "t-*.tar", "s-{0..99999999}.tar"):
        with pytest.raises(ValueError, match="is not a file"):
            open_source(Data(source=str(tmp_path / pattern)))


def test_a_file_with_braces_in_its_name_is_found(tmp_path):
    path = write(tmp_path / "a{1,2}[x].tar", pairs(["1"]))
    assert captions(open_source(Data(source=path))) == ["text 1"]


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_and_foreign_names_are_read_in_every_layout(tmp_path, layout):
    names = ["d" * 90 + "/" + "n" * 60, "short", "猫/é"]
    if layout != tarfile.USTAR_FORMAT:
        names.append("e" * 300 + "/x")
    source = open_source(Data(source=write(tmp_path / "a.tar", pairs(names), format=layout, encoding="utf-8")))
    samples = [source.read(0, index) for index in range(len(names))]
    assert [sample.key for sample in samples] == [f"a.tar/{name}" for name in names]
    assert [sample.y for sample in samples] == [f"text {name}" for name in names]


def test_names_that_leave_their_folder_are_bad_samples(tmp_path):
    names = ["../x.png", "/abs.txt", "a/../../y.png", "C:\\z.png"]
    members = [*pairs(["1", "a..b/2:3"]), *((name, image()) for name in names)]
    found = captions(open_source(Data(source=write(tmp_path / "a.tar", members))))
    assert found[:2] == ["text 1", "text a..b/2:3"]
    assert [bad.key for bad in found[2:]] == [f"a.tar/{name}" for name in names]
    assert all(bad.reason == "the member's name leaves its folder" for bad in found[2:])


def test_links_and_devices_are_not_followed(tmp_path):
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
    members = [*(link(f"{number}.txt", kind) for number, kind in enumerate(kinds, 2)), *pairs(["1"])]
    assert captions(open_source(Data(source=write(tmp_path / "a.tar", members)))) == ["text 1"]


def test_folders_that_claim_a_size_have_no_data(tmp_path):
    folder = tarfile.TarInfo("folder")
    folder.type, folder.size = tarfile.DIRTYPE, 4096
    path = tmp_path / "a.tar"
    write(path, pairs(["1"]))
    path.write_bytes(folder.tobuf() + path.read_bytes())
    assert captions(open_source(Data(source=str(path)))) == ["text 1"]


def test_the_extension_named_first_is_preferred(tmp_path):
    members = [("1.png", image(1)), ("1.gif", image(2)), ("1.bmp", image(3)), ("1.txt", b"one")]
    for order in (members, members[::-1]):
        path = write(tmp_path / "a.tar", order)
        assert open_source(Data(source=path, x="gif;png;bmp")).read(0, 0).x.getpixel((0, 0)) == 2


def test_incomplete_samples_are_bad_and_say_what_is_missing(tmp_path):
    members = [("1.png", image()), ("2.txt", b"two"), *pairs(["3"])]
    first, second, third = captions(open_source(Data(source=write(tmp_path / "a.tar", members))))
    assert (first.key, first.reason) == ("a.tar/1", "y: there is no member txt;caption;json:caption")
    assert second.reason.startswith("x: there is no member jpg;jpeg;png")
    assert third == "text 3"


def test_a_name_used_twice_is_two_samples(tmp_path):
    members = [("1.png", image()), ("1.txt", b"one"), ("1.png", image()), ("1.txt", b"other")]
    assert captions(open_source(Data(source=write(tmp_path / "a.tar", members)))) == ["one", "other"]


# Each member is one block of header and one block of data. Cuts: between samples, in a header, in data, between members.
@pytest.mark.parametrize(("cut", "bad"), [(2048, 0), (2048 + 100, 0), (2048 + 512 + 3, 0), (3072, 1)])
def test_samples_before_a_truncation_are_used_and_the_truncation_is_damage(tmp_path, cut, bad):
    path = tmp_path / "a.tar"
    write(path, pairs(["1", "2"]))
    path.write_bytes(path.read_bytes()[:cut])
    source = open_source(Data(source=str(path)))
    first, *others = captions(source)
    assert first == "text 1"
    assert len(others) == bad
    (damage,) = source.damage
    assert (damage.file, damage.read) == ("a.tar", 1 + bad)
    assert ("the end mark is missing" in damage.reason) == (cut % 1024 == 0)


def test_a_broken_header_is_damage_and_not_a_silent_end(tmp_path):
    path = tmp_path / "a.tar"
    write(path, pairs(["1", "2", "3"]))
    data = bytearray(path.read_bytes())
    data[4 * 1024 + 3] ^= 0xFF
    path.write_bytes(data)
    write(tmp_path / "b.tar", pairs(["4"]))
    source = open_source(Data(source=str(tmp_path / "*.tar")))
    assert captions(source) == ["text 1", "text 2", "text 4"]
    (damage,) = source.damage
    assert (damage.file, damage.read, damage.lost) == ("a.tar", 2, 1)
    assert "the header at byte 4096 is broken" in damage.reason


def test_joined_archives_are_reported(tmp_path):
    write(tmp_path / "1.tar", pairs(["1"]))
    write(tmp_path / "2.tar", pairs(["2"]))
    joined = tmp_path / "joined.tar"
    joined.write_bytes((tmp_path / "1.tar").read_bytes() + (tmp_path / "2.tar").read_bytes())
    source = open_source(Data(source=str(joined)))
    assert captions(source) == ["text 1"]
    assert "more data follows the end mark" in source.damage[0].reason
    assert source.damage[0].lost == 1


def with_size(name, field):
    """Return the header of a member with this size field."""
    header = bytearray(tarfile.TarInfo(name).tobuf())
    header[124:136] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_sizes_may_be_written_in_bytes(tmp_path):
    path = tmp_path / "a.tar"
    write(path, pairs(["1"]))
    caption = b"read to its end"
    member = with_size("2.txt", b"\x80" + len(caption).to_bytes(11, "big")) + caption.ljust(512, b"\0")
    path.write_bytes(member + path.read_bytes())
    source = open_source(Data(source=str(path), x="txt", y="txt;png"), x="text")
    assert captions(source) == ["read to its end", "text 1"]


def test_a_negative_or_endless_size_ends_the_walk(tmp_path):
    path = tmp_path / "a.tar"
    for field in (b"\xff" * 12, b"-0000001000\0", b"\x80" + b"\x7f" * 11):
        write(path, pairs(["1"]))
        path.write_bytes(path.read_bytes()[: 4 * 512] + with_size("2.png", field) + bytes(1024))
        source = open_source(Data(source=str(path)))
        assert captions(source) == ["text 1"]
        assert "does not end within the file" in source.damage[0].reason


def test_empty_foreign_and_compressed_files_are_refused(tmp_path):
    (tmp_path / "empty.tar").write_bytes(b"")
    (tmp_path / "foreign.tar").write_bytes(b"PK\x03\x04" + bytes(2000))
    write(tmp_path / "nothing.tar", [])
    write(tmp_path / "other.tar", [("a.npy", b"123")])
    for name, reason in [
        ("empty.tar", "the file is empty"),
        ("foreign.tar", "is not a tar file"),
        ("nothing.tar", "no member ends in jpg"),
        ("other.tar", "no member ends in jpg.*name the extensions as data.x and data.y"),
    ]:
        with pytest.raises(ValueError, match=reason):
            open_source(Data(source=str(tmp_path / name)))
    for suffix in ("gz", "bz2", "xz"):
        with tarfile.open(tmp_path / f"a.tar.{suffix}", f"w:{suffix}") as tar:
            tar.addfile(tarfile.TarInfo("x"))
        with pytest.raises(ValueError, match=r"is compressed \((gzip|bzip2|xz)\).*unpack it"):
            open_source(Data(source=str(tmp_path / f"a.tar.{suffix}")))


def test_an_empty_shard_among_others_is_damage(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"")
    write(tmp_path / "b.tar", pairs(["1"]))
    source = open_source(Data(source=str(tmp_path / "*.tar")))
    assert captions(source) == ["text 1"]
    assert source.damage == [("a.tar", "the file is empty", 0, None, 1)]


def test_values_come_from_the_members_that_are_named(tmp_path):
    told = {"caption": "from json", "hard": ["no", "neither"], "class": 3}
    members = [("1.json", json.dumps(told).encode()), ("1.left.png", image(9)), ("1.png", image(1)), ("1.cls", b"7\n")]
    path = write(tmp_path / "a.tar", members)
    source = open_source(Data(source=path, x="left.png", y="txt;json:caption", negatives="json:hard", label="cls"))
    sample = source.read(0, 0)
    assert sample.x.getpixel((0, 0)) == 9
    assert sample[2:5] == ("from json", ("no", "neither"), "7")
    assert source.label(0, 0) == "7"
    assert open_source(Data(source=path, label="json:class")).label(0, 0) == "3"
    for wrong in ({"y": "json"}, {"y": "txt:key"}, {"x": " ; "}, {"x": "json:key"}):
        with pytest.raises(ValueError, match=r"data\.[xy] is"):
            open_source(Data(source=path, **wrong))


def test_text_pairs_need_the_extensions_of_both(tmp_path):
    path = write(tmp_path / "a.tar", [("1.q.txt", b"why"), ("1.a.txt", b"because")])
    assert open_source(Data(source=path, x="q.txt", y="a.txt"), x="text").read(0, 0)[1:3] == ("why", "because")
    with pytest.raises(ValueError, match="both sides are texts"):
        open_source(Data(source=path), x="text")


def test_broken_members_are_bad_samples(tmp_path):
    members = [
        *[("1.png", b"no image"), ("1.txt", b"one")],
        *[("2.png", image()), ("2.txt", b"caf\xe9")],
        *[("3.png", image()), ("3.json", b"{")],
        *[("4.png", image()), ("4.json", b"[" * 100_000)],
        *[("5.png", image()), ("5.json", b"[1]")],
        *[("6.png", image()), ("6.txt", b"x" * (2**20 + 1))],
        *[("7.png", image()), ("7.txt", b"")],
        *[("8.png", image()), ("8.json", json.dumps({"caption": "a", "more": "x" * 2**20}).encode())],
    ]
    found = captions(open_source(Data(source=write(tmp_path / "a.tar", members))))
    reasons = ["not an image", "not valid UTF-8", "not valid JSON", "not valid JSON", "holds a list", "1048577 bytes", "y is empty"]
    reasons.append("a text may have at most")
    for bad, reason in zip(found, reasons, strict=True):
        assert reason in bad.reason


def test_a_shard_that_vanishes_or_shrinks_later_makes_bad_samples(tmp_path):
    path = tmp_path / "a.tar"
    source = open_source(Data(source=write(path, pairs(["1"]))))
    path.write_bytes(b"")
    assert "has become shorter" in captions(source)[0].reason
    path.unlink()
    assert "cannot be read" in captions(source)[0].reason


def test_names_reach_the_log_as_plain_text(tmp_path):
    path = write(tmp_path / "a.tar", pairs(["\x1b[31mred\nline"]), format=tarfile.GNU_FORMAT)
    assert open_source(Data(source=path)).read(0, 0).key == "a.tar/\\x1b[31mred\\nline"


def test_shards_can_be_pickled(tmp_path):
    members = [*pairs(["1", "2"]), ("../x.png", image())]
    source = open_source(Data(source=write(tmp_path / "a.tar", members)))
    copy = pickle.loads(pickle.dumps(source))
    assert [str(found) for found in captions(copy)] == [str(found) for found in captions(source)]
