"""A convolutional network that is small enough to train on a CPU."""

from __future__ import annotations

from torch import Tensor, nn

from .image_transform import Pixels, PrepareImage
from .tower import Tower
from .transformer import Perceptron, through

# Where a map of features is this small, its places are laid side by side.
SMALLEST = 7


def cnn(
    dim: int,
    *,
    size: int = 32,
    channels: int = 3,
    width: int = 32,
    depth: int = 0,
    hidden: int = 256,
    patch: int = 4,
    crop: float = 1.0,
    flip: bool = False,
    checkpointing: bool = False,
) -> Tower:
    """Convolutions for images of size × size pixels, then a perceptron over all places that are left.

    The first one takes overlapping patches, `patch` pixels apart, to `width` features; each further one halves the edge and doubles
    the features, until no more than 7 × 7 places are left. depth: residual convolutions at each size. hidden: width of the
    perceptron. No layer looks at other rows (no batch norm), so that chunks change nothing.
    channels, crop, flip: see `PrepareImage`.
    """
    if patch < 2 or patch % 2 or size % patch:
        raise ValueError(f"size is {size} and patch is {patch}: patch must be even and divide size")
    prepare = PrepareImage(size, channels, crop, flip)
    edge = size // patch
    stages = [_stage(nn.Conv2d(channels, width, 2 * patch, patch, patch // 2), depth)]
    while edge > SMALLEST:
        stages.append(_stage(nn.Conv2d(width, 2 * width, 3, 2, 1), depth))
        edge, width = (edge + 1) // 2, 2 * width
    module = ConvolutionalNetwork(stages, width * edge**2, hidden, dim, checkpointing=checkpointing)
    return Tower(module, prepare, "image")


class ConvolutionalNetwork(nn.Module):
    """(rows, channels, size, size) bytes to (rows, dim)."""

    def __init__(self, stages: list[nn.Sequential], flat: int, hidden: int, dim: int, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.pixels = Pixels()
        self.stages = nn.ModuleList(stages)
        self.perceptron = nn.Sequential(nn.Linear(flat, hidden), Perceptron(hidden, 2, nn.ReLU), nn.LayerNorm(hidden))
        self.head = nn.Linear(hidden, dim, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = through(self.stages, self.pixels(images), checkpointing=self.checkpointing)
        return self.head(self.perceptron(x.flatten(1)))


class Residual(nn.Module):
    """x + a convolution of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(self.norm(x)).relu()


def _stage(convolution: nn.Conv2d, depth: int) -> nn.Sequential:
    features = convolution.out_channels
    return nn.Sequential(convolution, nn.GroupNorm(1, features), nn.ReLU(), *[Residual(features) for _ in range(depth)])
