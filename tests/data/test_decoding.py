"""Decoding of untrusted images and texts: limits are checked first, and every refusal has a reason."""

import io
import os
import random
import struct
import zlib

import pytest
import torch
from PIL import Image

from megabatch.data import BadSample, decoding
from megabatch.data.decoding import as_text, decode_image, read_image
from megabatch.data.source import ImageRequest
from megabatch.towers.inputs import PrepareImage

LIMIT = 1000


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_claiming(width, height):
    """Return a PNG with a valid header and almost no data."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_known_format_is_decoded(kind, tmp_path):
    data = encoded(Image.new("RGB", (4, 3), (255, 0, 0)), kind)
    (tmp_path / "a").write_bytes(data)
    for source in (data, tmp_path / "a"):
        image = decode_image(source, "a", LIMIT)
        assert (image.mode, image.size) == ("RGB", (4, 3))
        assert image.getpixel((1, 1))[0] > 250


def test_a_claimed_size_is_refused_before_anything_is_decoded(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(BadSample, match=r"1001 × 1 pixels, more than data.max_pixels = 1000"):
        decode_image(png_claiming(1001, 1), "a", LIMIT)


@pytest.mark.parametrize("size", [(9_460, 9_460), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_a_decompression_bomb_is_refused_without_a_warning_at_any_limit(size):
    # Pillow itself would warn about the first and refuse the others.
    with pytest.raises(BadSample, match=r"data\.max_pixels"):
        decode_image(png_claiming(*size), "bomb", 50_000_000)
    with pytest.raises(BadSample, match=r"cannot be decoded|limit is below"):
        decode_image(png_claiming(*size), "bomb", 2**63)


def test_a_decompression_bomb_is_refused_by_its_pixels_not_its_bytes():
    data = encoded(Image.new("L", (1200, 1001)))
    assert len(data) < 5_000
    with pytest.raises(BadSample, match="1200 × 1001"):
        decode_image(data, "bomb", 1200 * 1000)
    assert decode_image(data, "bomb", 1200 * 1001).size == (1200, 1001)


def test_data_that_is_not_an_image_is_refused_with_a_reason(tmp_path):
    whole = encoded(Image.effect_noise((30, 30), 80), "JPEG")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for data, reason in [
        (b"", "is not an image of a known format"),
        (b"<svg/>", "is not an image of a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "is not an image of a known format"),
        (whole[: len(whole) // 2], "cannot be decoded .*truncated"),
        (encoded(Image.effect_noise((30, 30), 80))[:-300], "cannot be decoded"),
        (tmp_path / "missing.png", "there is no image 'missing.png'"),
        (tmp_path / "pipe.png", "there is no image 'pipe.png'"),
        (tmp_path / "folder.png", "there is no image 'folder.png'"),
        (encoded(Image.new("F", (3, 3)), "TIFF"), "floating-point"),
    ]:
        with pytest.raises(BadSample, match=reason) as caught:
            decode_image(data, "the key", LIMIT)
        assert caught.value.key == "the key"


def test_exif_orientation_is_applied():
    image = Image.new("RGB", (4, 2))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encoded(image, "JPEG", exif=exif), "a", LIMIT).size == (2, 4)


def test_an_image_with_broken_metadata_is_decoded():
    data = encoded(Image.new("RGB", (4, 2)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert decode_image(data, "a", LIMIT).size == (4, 2)


def test_other_bit_depths_become_grey_or_rgb_without_a_warning():
    deep = Image.new("I;16", (2, 2), 40_000)
    assert decode_image(encoded(deep), "a", LIMIT).getpixel((0, 0)) == 40_000 // 256
    palette = encoded(Image.new("P", (2, 2), 1), transparency=b"\x00\x80")
    expected = {"1": "L", "LA": "RGB", "RGBA": "RGB", "CMYK": "RGB"}
    assert decode_image(palette, "a", LIMIT).mode == "RGB"
    for mode, wanted in expected.items():
        kind = "TIFF" if mode == "CMYK" else "PNG"
        assert decode_image(encoded(Image.new(mode, (2, 2)), kind), "a", LIMIT).mode == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("  a dog\n", "a dog"),
        (b"\xef\xbb\xbfwith a mark", "with a mark"),
        ("<script>alert('&')</script>", "<script>alert('&')</script>"),
        ("x" * 10_000, "x" * 10_000),
        ("naïve 猫 🐈", "naïve 猫 🐈"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_texts_are_unchanged_except_for_surrounding_space(value, wanted):
    assert as_text(value, "a", "caption") == wanted


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "caption is empty"),
        (" \n\t", "caption is empty"),
        (None, "caption is missing"),
        (7, "caption is of type int"),
        (["a"], "caption is of type list"),
        (b"caf\xe9", "caption is not valid UTF-8 at character 3"),
        ("half \ud83d", "caption is not valid UTF-8"),
        ("a\0b", "NUL"),
        ("dog".encode("utf-16"), "not valid UTF-8|NUL"),
        (b"x" * (2**20 + 1), "1048577 bytes"),
    ],
)
def test_values_that_are_not_texts_are_refused_with_a_reason(value, reason):
    with pytest.raises(BadSample, match=reason):
        as_text(value, "a", "caption")


def smooth(width, height):
    """Return an image that looks different in each orientation, with little detail."""
    return Image.linear_gradient("L").convert("RGB").rotate(30).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(640, 480), (481, 1290)])
def test_a_reduced_jpeg_is_upright_and_keeps_the_sufficient_size(size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(smooth(*size), "JPEG", exif=exif)
    whole = decode_image(data, "a", 10**6)
    asked = []

    def sufficient(width, height):
        asked.append((width, height))
        return width / 2.5, height / 2.5

    reduced = decode_image(data, "a", 10**6, sufficient)
    assert asked == [whole.size]
    assert all(full / 2.5 <= edge <= full / 2 + 1 for edge, full in zip(reduced.size, whole.size, strict=True))
    small = [list(image.resize((8, 8), Image.Resampling.BOX).tobytes()) for image in (reduced, whole)]
    # A level of rounding in each of three steps.
    assert small[0] == pytest.approx(small[1], abs=3)


@pytest.mark.parametrize(("seed", "crop"), [(None, 1.0), (1, 1.0), (2, 0.3), (3, 0.9)])
def test_preparation_says_how_far_an_image_may_be_reduced(seed, crop):
    prepare = PrepareImage(60, crop=crop)
    for width, height in ((1280, 960), (480, 2000), (100, 61), (31, 40)):
        wide, high = prepare.sufficient_size(seed, width, height)
        assert wide / high == pytest.approx(width / height)
        left, top, right, bottom = prepare._box((width, height), prepare._generator(seed))
        assert min((right - left) * wide / width, (bottom - top) * high / height) == pytest.approx(60)


def test_pixels_of_a_reduced_jpeg_differ_little():
    gradient = Image.linear_gradient("L").resize((640, 480)).convert("RGB")
    prepare, data = PrepareImage(112), encoded(gradient, "JPEG", quality=95)
    whole = prepare(decode_image(data, "a", 10**6), None).int()
    reduced = prepare(decode_image(data, "a", 10**6, lambda *size: prepare.sufficient_size(None, *size)), None).int()
    # Two roundings to 8 bits and the ringing of JPEG's blocks.
    assert 0 < (whole - reduced).abs().max() <= 4


def test_a_truncated_jpeg_is_refused_when_it_is_reduced():
    data = encoded(smooth(640, 480), "JPEG")
    with pytest.raises(BadSample, match="cannot be decoded"):
        decode_image(data[: len(data) // 2], "a", 10**6, lambda width, height: (width / 8, height / 8))


def test_formats_that_cannot_be_reduced_are_decoded_whole():
    for kind in ("PNG", "WEBP", "TIFF"):
        assert decode_image(encoded(smooth(64, 48), kind), "a", 10**6, lambda width, height: (8, 6)).size == (64, 48)


def photo(width, height, mode="RGB", seed=0):
    """Return noise in several scales, which no two decoders would decode alike by chance."""
    generator = random.Random(seed)

    def noise(*size):
        return Image.frombytes(mode, size, generator.randbytes(len(mode) * size[0] * size[1]))

    return Image.blend(noise(9, 7).resize((width, height), Image.Resampling.BICUBIC), noise(width, height), 0.2)


def as_tensor(image):
    """Return the pixels of an image of Pillow."""
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, -1)


@pytest.mark.parametrize("edge", [1, 1.9, 2.1, 4.5, 9])
@pytest.mark.parametrize(
    "options",
    [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"quality": 30}, {"progressive": True}, {"mode": "L"}],
    ids=str,
)
def test_a_tensor_has_the_pixels_that_pillow_decodes(edge, options):
    pytest.importorskip("simplejpeg")
    options = dict(options)
    mode = options.pop("mode", "RGB")
    for number, size in enumerate([(160, 136), (161, 255), (203, 149), (136, 500)]):
        data = encoded(photo(*size, mode, number), "JPEG", **options)

        def sufficient(width, height):
            return width / edge, height / edge

        tensor = read_image(data, "a", 10**6, ImageRequest(sufficient, tensor=True))
        assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8
        assert torch.equal(tensor, as_tensor(decode_image(data, "a", 10**6, sufficient)))
    assert torch.equal(read_image(data, "a", 10**6, ImageRequest(tensor=True)), as_tensor(decode_image(data, "a", 10**6)))


def test_images_that_pillow_has_to_decode_are_no_tensors():
    rgb, rotated = photo(40, 30), Image.Exif()
    rotated[0x0112] = 6
    others = [encoded(rgb), encoded(rgb, "WEBP"), encoded(rgb, "JPEG", exif=rotated), encoded(photo(40, 30, "CMYK"), "JPEG")]
    others += [encoded(rgb, "JPEG", keep_rgb=True), encoded(photo(15, 200), "JPEG")]
    for data in others:
        image = read_image(data, "a", LIMIT * 10, ImageRequest(tensor=True))
        assert image.tobytes() == decode_image(data, "a", LIMIT * 10).tobytes()


def test_no_tensors_without_simplejpeg(monkeypatch):
    monkeypatch.setattr(decoding, "_import_simplejpeg", lambda: None)
    data = encoded(photo(40, 30), "JPEG")
    assert isinstance(read_image(data, "a", 10**6, ImageRequest(tensor=True)), Image.Image)


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=str)
def test_damaged_jpegs_are_refused_or_decoded_as_pillow_does(options):
    noise = random.Random(0)
    whole = encoded(photo(48, 40), "JPEG", **options)
    damaged = [whole[: noise.randrange(2, len(whole))] for _ in range(60)]
    for _ in range(240):
        data = bytearray(whole)
        for _ in range(noise.choice([1, 1, 3])):
            data[noise.randrange(2, len(data))] = noise.randrange(256)
        damaged.append(bytes(data))
    damaged += [whole + b"tail", whole[:-2]]

    def outcome(data, tensor):
        try:
            image = read_image(data, "a", 10**6, ImageRequest(tensor=tensor))
        except BadSample as error:
            return error.reason
        return (image if isinstance(image, torch.Tensor) else as_tensor(image)).tolist()

    outcomes = [outcome(data, tensor=False) for data in damaged]
    assert [outcome(data, tensor=True) for data in damaged] == outcomes
    assert 20 < sum(isinstance(each, str) for each in outcomes) < len(damaged) - 20
