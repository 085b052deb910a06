"""JPEGs decoded by a device: the workers' samples, order, crops and refusals, and their pixels within a tolerance."""

import io
import random
import tarfile

import pytest
import torch
from PIL import Image
from small_runs import PAIRS, assert_equal, final, run_of, stopping, train, write_pairs

from megabatch.config import Data
from megabatch.data import BadSample, device_decoding, open_source
from megabatch.data import loader as loader_module
from megabatch.data.decoding import read_image
from megabatch.data.device_decoding import DeviceDecoder, open_decoder
from megabatch.data.loader import Loader
from megabatch.data.sampler import Order
from megabatch.data.source import EncodedJpeg, ImageRequest
from megabatch.towers.inputs import ByteTokenizer, PrepareImage
from megabatch.training import build
from megabatch.training.signals import Stopped

LIMIT = 10**6
SIZES = [(64, 48), (48, 64), (97, 61), (40, 40), (64, 48), (33, 90)]


def photo(width, height, seed=0, mode="RGB"):
    """Return smooth noise: what JPEGs hold, without edges at which decoders differ."""
    small = random.Random(seed).randbytes(len(mode) * 64)
    return Image.frombytes(mode, (8, 8), small).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 95} | options)
    return file.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def decode_with_pillow(jpegs, grey):
    """Stand in for nvJPEG: decodes as stored, ignores the orientation, and raises RuntimeError."""
    images = []
    for data in jpegs:
        try:
            image = Image.open(io.BytesIO(bytes(data.tolist()))).convert("L" if grey else "RGB")
        except Exception as error:
            raise RuntimeError(f"cannot be decoded ({error})") from error
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        images.append(pixels.view(image.height, image.width, -1).permute(2, 0, 1))
    return images


def standing_in(decode=decode_with_pillow):
    return DeviceDecoder(torch.device("cpu"), LIMIT, decode)


def write_shard(path, images):
    """Write JPEGs, or other images by (suffix, data), with captions."""
    with tarfile.open(path, "w") as tar:
        for number, data in enumerate(images):
            suffix, data = data if isinstance(data, tuple) else ("jpg", data)
            for ending, content in ((suffix, data), ("txt", f"caption {number}".encode())):
                member = tarfile.TarInfo(f"{number:03}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return open_source(Data(source=str(path), max_pixels=LIMIT))


def load(source, decoder, prepare=None, **options):
    options = {"seed": 3, "workers": 0, "rank": 0, "ranks": 1, "ids": True, "classes": None, "reduce_jpegs": False} | options
    prepare = prepare or PrepareImage(24, crop=0.5, flip=True)
    return Loader(source, Order(source.lengths, 100, 0), prepare, ByteTokenizer(12), decoder=decoder, **options)


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "png", file.getvalue()


def mixed_images(**options):
    """Return colour, grey, rotated, progressive, CMYK and PNG images, and broken ones: half a JPEG, and no image at all."""
    images = [jpeg(photo(*size, seed), **options) for seed, size in enumerate(SIZES)]
    images += [jpeg(photo(50, 30, 10 + turn), exif=exif(turn), **options) for turn in range(1, 9)]
    images += [jpeg(photo(45, 35, 20, "L")), jpeg(photo(45, 35, 21), progressive=True), jpeg(photo(45, 35, 22, "CMYK"))]
    images += [png(photo(45, 35, 23)), jpeg(photo(60, 60, 24))[:900], b"no image"]
    return images


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("augment", [True, False])
def test_a_device_gives_the_rows_of_the_workers(tmp_path, channels, augment):
    source = write_shard(tmp_path / "a.tar", mixed_images())
    prepare = PrepareImage(24, channels=channels, crop=0.5, flip=True)
    steps = [(0, 7), (7, 13), (20, 11)]
    expected = list(load(source, None, prepare, augment=augment).batches(steps))
    batches = list(load(source, standing_in(), prepare, augment=augment).batches(steps))
    for ours, theirs in zip(batches, expected, strict=True):
        assert (ours.keys, ours.positions, ours.bad) == (theirs.keys, theirs.positions, theirs.bad)
        assert torch.equal(ours.y, theirs.y)
        assert torch.equal(ours.ids, theirs.ids)
        assert (ours.x.shape, ours.x.dtype, ours.x.device) == (theirs.x.shape, torch.uint8, theirs.x.device)
        # The CPU rounds between the two directions of the resize, the device once at the end.
        assert (ours.x.int() - theirs.x.int()).abs().max() <= 2
    assert sum(len(batch.bad) for batch in expected) >= 2


def test_workers_and_ranks_do_not_change_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_module, "PIECE_ROWS", 3)
    source = write_shard(tmp_path / "a.tar", mixed_images())
    whole = list(load(source, standing_in()).batches([(0, 12), (12, 20)]))
    shared = [list(load(source, standing_in(), workers=rank, rank=rank, ranks=2).batches([(0, 12), (12, 20)])) for rank in range(2)]
    for number, batch in enumerate(whole):
        parts = [ranks[number] for ranks in shared]
        assert batch.keys == [key for part in parts for key in part.keys]
        assert torch.equal(batch.x, torch.cat([part.x for part in parts]))
    # A run that starts at the second step reads what an uninterrupted one reads.
    (resumed,) = load(source, standing_in()).batches([(12, 20)])
    assert torch.equal(resumed.x, whole[1].x)


def test_the_size_of_the_groups_does_not_change_a_row(tmp_path, monkeypatch):
    source = write_shard(tmp_path / "a.tar", mixed_images())
    (expected,) = load(source, standing_in()).batches([(0, 20)])
    sizes = []

    def counting(jpegs, grey):
        sizes.append(len(jpegs))
        return decode_with_pillow(jpegs, grey)

    monkeypatch.setattr(device_decoding, "GROUP_PIXELS", 10_000)
    (batch,) = load(source, standing_in(counting)).batches([(0, 20)])
    assert torch.equal(batch.x, expected.x)
    assert 1 < max(sizes) < sum(sizes) / 2


def test_an_image_that_the_device_cannot_decode_is_decoded_by_the_cpu(tmp_path):
    source = write_shard(tmp_path / "a.tar", [jpeg(photo(*size, seed)) for seed, size in enumerate(SIZES)])

    def picky(jpegs, grey):
        images = decode_with_pillow(jpegs, grey)
        if any(image.shape[1:] == (61, 97) for image in images):
            raise RuntimeError("nvjpegDecode failed: 4")
        # A wrong size is an error too.
        return [image[:, 1:] if image.shape[1:] == (40, 40) else image for image in images]

    (expected,) = load(source, standing_in()).batches([(0, 6)])
    (batch,) = load(source, standing_in(picky)).batches([(0, 6)])
    assert batch.keys == expected.keys
    assert torch.equal(batch.x, expected.x)


def test_a_sample_that_nothing_can_decode_is_skipped_with_all_of_its_values(tmp_path):
    whole = jpeg(photo(64, 48), quality=100)
    # Complete by its header and its end, but its scan has seven components: Pillow refuses it, and so does the stand-in.
    scan = whole.index(b"\xff\xda")
    torn = whole[: scan + 4] + b"\x07" + whole[scan + 5 :]
    assert isinstance(read_image(torn, "a", LIMIT, ImageRequest(encoded=True)), EncodedJpeg)
    source = write_shard(tmp_path / "a.tar", [whole, torn, whole])
    (expected,) = load(source, None).batches([(0, 3)])
    (batch,) = load(source, standing_in()).batches([(0, 3)])
    assert len(batch.bad) == 1
    assert (batch.keys, batch.positions, batch.bad) == (expected.keys, expected.positions, expected.bad)
    assert torch.equal(batch.ids, expected.ids)
    assert torch.equal(batch.y, expected.y)
    assert batch.x.shape == expected.x.shape


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_runs_out_makes_groups_smaller(tmp_path, error):
    source = write_shard(tmp_path / "a.tar", [jpeg(photo(*size, seed)) for seed, size in enumerate(SIZES)])
    (expected,) = load(source, standing_in()).batches([(0, 6)])

    def small(most):
        def decode(jpegs, grey):
            if len(jpegs) > most:
                raise error("Error while decoding JPEG images: CUDA out of memory")
            return decode_with_pillow(jpegs, grey)

        return standing_in(decode)

    (batch,) = load(source, small(2)).batches([(0, 6)])
    assert torch.equal(batch.x, expected.x)
    with pytest.raises(error, match="out of memory"):
        list(load(source, small(0)).batches([(0, 6)]))


def test_a_rank_without_rows_has_their_shape(tmp_path):
    source = write_shard(tmp_path / "a.tar", [jpeg(photo(64, 48))])
    (batch,) = load(source, standing_in(), rank=1, ranks=2).batches([(0, 1)])
    assert (batch.keys, batch.x.shape, batch.x.dtype) == ([], (0, 3, 24, 24), torch.uint8)


def test_only_jpegs_that_nvjpeg_decodes_alike_are_kept():
    rgb = photo(40, 30)
    assert isinstance(read_image(jpeg(rgb), "a", LIMIT, ImageRequest(encoded=True)), EncodedJpeg)
    turned = read_image(jpeg(rgb, exif=exif(6)), "a", LIMIT, ImageRequest(encoded=True))
    assert (turned.width, turned.height, turned.transposition, turned.grey) == (30, 40, "ROTATE_270", False)
    assert read_image(jpeg(rgb.convert("L")), "a", LIMIT, ImageRequest(encoded=True)).grey
    kept_rgb = jpeg(rgb, keep_rgb=True)
    for data in (jpeg(rgb, progressive=True), jpeg(rgb.convert("CMYK")), kept_rgb, png(rgb)[1]):
        assert isinstance(read_image(data, "a", LIMIT, ImageRequest(encoded=True)), Image.Image)
    with pytest.raises(BadSample, match="truncated"):
        read_image(jpeg(rgb)[:-100], "a", LIMIT, ImageRequest(encoded=True))
    with pytest.raises(BadSample, match=r"40 × 30 pixels, more than data.max_pixels = 1000"):
        read_image(jpeg(rgb), "a", 1000, ImageRequest(encoded=True))


def test_a_run_on_a_cpu_is_refused_with_the_remedy(tmp_path):
    write_shard(tmp_path / "a.tar", [jpeg(photo(40, 60, seed)) for seed in range(4)])
    run = run_of(tmp_path / "a.tar", tmp_path / "run", "x.name=cnn", "x.options.size=16", "data.decode=device")
    # Whether torchvision is installed does not matter then.
    with pytest.raises(ValueError, match=r'data.decode is "device".*\'cpu\': only CUDA devices.*data.decode="workers"'):
        train(run)


def test_a_run_without_images_is_refused(tmp_path):
    run = run_of(write_pairs(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run", "data.decode=device")
    with pytest.raises(ValueError, match=r'data.decode is "device".*no tower.*data.decode="workers"'):
        train(run)


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_is_bit_equal_to_one_that_is_not(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.tar", [jpeg(photo(40 + seed, 60, seed)) for seed in range(40)])
    monkeypatch.setattr(build, "open_decoder", lambda device, max_pixels: standing_in())
    options = ["x.name=cnn", "x.options.size=16", "x.options.crop=0.8", "data.workers=1", "data.decode=device"]

    def run(name):
        return run_of(tmp_path / "a.tar", tmp_path / name, *options)

    train(run("whole"))
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, after=3)
        with pytest.raises(Stopped, match="after step 3"):
            train(run("parts"))
    train(run("parts"))
    assert_equal(final(tmp_path / "whole"), final(tmp_path / "parts"))


def differences(source, decoder, prepare, workers):
    """Return by how many levels each pixel of the device differs from that of the workers, by rows."""
    steps = [(0, 12), (12, sum(source.lengths) - 12)]
    expected = load(source, None, prepare).batches(steps)
    levels = []
    for ours, theirs in zip(load(source, decoder, prepare, workers=workers).batches(steps), expected, strict=True):
        assert (ours.keys, ours.bad) == (theirs.keys, theirs.bad)
        levels.append((ours.x.int() - theirs.x.int()).abs().float().flatten(1))
    levels = torch.cat(levels)
    print(f"{prepare}: {levels.mean(1).max():.2f} levels in the mean of the worst image, {levels.max():.0f} at most")
    return levels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prepare", [PrepareImage(24, crop=0.5, flip=True), PrepareImage(24, channels=1), PrepareImage(64)])
def test_nvjpeg_gives_the_pixels_of_the_workers(tmp_path, prepare, workers):
    # With colours at full size, two decoders differ by the rounding of the inverse DCT and of the colours, which the resize can
    # amplify a little.
    source = write_shard(tmp_path / "a.tar", mixed_images(subsampling=0))
    levels = differences(source, open_decoder(torch.device("cuda"), LIMIT), prepare, workers)
    assert levels.mean() <= 1
    assert levels.max() <= 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nvjpeg_gives_the_pixels_of_the_workers_for_photographs(tmp_path):
    from benchmarks.feeding import natural_image

    # Colours at half of the size: libjpeg interpolates them, nvJPEG may repeat them, which alone gives 0.9 levels in the mean of an
    # image and 8 at most at this size.
    source = write_shard(tmp_path / "a.tar", [jpeg(natural_image(seed), quality=66) for seed in range(16)])
    levels = differences(source, open_decoder(torch.device("cuda"), LIMIT), PrepareImage(224, crop=0.9), 2)
    assert levels.mean(1).max() <= 1.5
    assert levels.max() <= 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nvjpeg_gives_the_same_pixels_again_while_the_device_computes(tmp_path):
    source = write_shard(tmp_path / "a.tar", [jpeg(photo(*size, seed)) for seed, size in enumerate(SIZES)] * 20)
    decoder = open_decoder(torch.device("cuda"), LIMIT)
    matrix = torch.randn(4096, 4096, device="cuda")
    first = [batch.x.clone() for batch in load(source, decoder).batches([(0, 60), (60, 60)])]
    batches = load(source, decoder, workers=2, pinned=True).batches([(0, 60), (60, 60)])
    for expected, batch in zip(first, batches, strict=True):
        for _ in range(20):
            matrix @ matrix
        assert batch.x.is_pinned()
        assert torch.equal(batch.x, expected)
