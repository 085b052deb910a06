"""Trains several runs of one cell at once: the same towers, batch and number of samples, with different rates and seeds.

Every weight has a leading dimension for the runs, so that a small batch still fills a GPU, and on CUDA several steps are one graph.
Up to STACKED pairs the gradients of the loss come from its plain formula for all runs at once; beyond, from `megabatch.clip_loss`
and `megabatch.siglip_loss`, one run after the other, which never store the similarity matrix. Hard negatives, one for each pair and
mined before the training, are further columns of the softmax over y.

    R runs, B pairs, F features, H hidden units, D the width of the embeddings
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch
from benchmarks.study.features import Features, Side
from megabatch.data.sampler import stable_hash
from megabatch.training.noise.estimator import Micro, Moments, estimate, moments

# The largest batch whose similarity matrices of all runs are stored.
STACKED = 1024
BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.98), 1e-6, 0.1
# The usual share of the steps in which the rate rises linearly from 0; then it falls to 0 as a cosine.
WARM_UP = 0.1
MAX_SCALE = 100.0
# Pairs of all steps of one graph: small batches need many steps in a graph, because launching one takes the host some 10 µs.
GRAPH_PAIRS, GRAPH_STEPS = 8192, 32
# Without a graph, a cell with more steps than this takes too long.
MOST_EAGER_STEPS = 2000
# Rows that go through a tower at once in an evaluation.
EVALUATED = 4096
# The noise of the gradient is measured after these shares of the steps, between at most so many batches, and fewer where a run has
# fewer steps than this for each.
NOISE_SHARES, NOISE_BATCHES, NOISE_STEPS = (0.25, 0.5, 0.75), 16, 60
# Similarities that are stored at once while negatives are mined.
MINED = 2**28


class Size(NamedTuple):
    """The shape of both towers. blocks: residual layers of width `hidden`."""

    hidden: int
    blocks: int
    width: int


class Objective(NamedTuple):
    """A loss of the study: initial scale and bias, its gradients for stacked runs, and megabatch's function for one run."""

    scale: float
    bias: float
    stacked: Callable[[Tensor, Tensor, Tensor, Tensor, float], LossGradients]
    loss: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


class LossGradients(NamedTuple):
    """Gradients of the loss of every run: of the embeddings (R, B, D), and of scale and bias (R)."""

    x: Tensor
    y: Tensor
    scale: Tensor
    bias: Tensor


class Kind(NamedTuple):
    """How a cell trains, whatever its source, batch and number of samples. negatives: mined hard negatives of each pair, 0 or 1."""

    size: str
    start: str
    loss: str
    smoothing: float
    warm_up: float = WARM_UP
    negatives: int = 0


class Cell(NamedTuple):
    """What all runs of a stack share. warm_up: share of the steps. negatives: mined hard negatives of each pair, 0 or 1."""

    source: str
    size: str
    start: str
    loss: str
    smoothing: float
    batch: int
    samples: int
    warm_up: float = WARM_UP
    negatives: int = 0

    @property
    def steps(self) -> int:
        return self.samples // self.batch

    @property
    def kind(self) -> Kind:
        return Kind(self.size, self.start, self.loss, self.smoothing, self.warm_up, self.negatives)


class Quality(NamedTuple):
    """Retrieval of one run among the pairs of a part. ranks: (2, pairs), x to y and y to x; 0 if the positive is the nearest."""

    ranks: Tensor

    def recall(self, k: int) -> float:
        return float((self.ranks < k).double().mean())

    def reciprocal_rank(self) -> float:
        return float((1 / (1 + self.ranks.double())).mean())


class Trained(NamedTuple):
    """The results of a stack: one entry for each run."""

    validation: list[Quality]
    test: list[Quality]
    scale: list[float]
    seconds: float
    # None, or why the steps were not captured in a graph.
    not_captured: str | None
    weights: Weights
    # The noise of each run's gradient at the points that were asked for.
    noise: list[list[NoisePoint]]


class NoisePoint(NamedTuple):
    """The noise of a run's gradient after `step` steps. None if the run has diverged."""

    step: int
    moments: Moments | None

    def row(self) -> dict[str, float | None]:
        """Return the values as a row has them; None instead of those that are not finite."""
        if self.moments is None:
            return {"step": self.step, "trace": None, "signal": None, "critical": None}
        critical = estimate([self.moments]).critical
        return {"step": self.step, **self.moments._asdict(), "critical": critical if math.isfinite(critical) else None}


SIZES = {"small": Size(256, 0, 128), "large": Size(1024, 2, 256)}


def clip_gradients_stacked(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, smoothing: float) -> LossGradients:
    """Return the gradients of `megabatch.clip_loss` for each run of a stack, by the plain formula."""
    batch = x.shape[1]
    similarity = torch.bmm(x, y.mT)
    logits = similarity * scale[:, None, None]
    # d loss / d logits = ((p_rows + p_columns) / 2 - target) / batch, with target = (1 - smoothing) * identity + smoothing / batch.
    slope = (logits.softmax(2) + logits.softmax(1)) * (0.5 / batch) - smoothing / batch**2
    slope.diagonal(dim1=1, dim2=2).sub_((1 - smoothing) / batch)
    return _through_logits(x, y, similarity, scale, slope)


def siglip_gradients_stacked(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, smoothing: float) -> LossGradients:
    """Return the gradients of `megabatch.siglip_loss` for each run of a stack, by the plain formula."""
    similarity = torch.bmm(x, y.mT)
    slope = torch.sigmoid(similarity * scale[:, None, None] + bias[:, None, None]) / x.shape[1]
    slope.diagonal(dim1=1, dim2=2).sub_(1 / x.shape[1])
    return _through_logits(x, y, similarity, scale, slope)


def hard_gradients_stacked(x: Tensor, y: Tensor, scale: Tensor, own: Tensor) -> LossGradients:
    """Return the gradients of the softmax loss with hard negatives: the rows of y (R, 2B, D) beyond the first B.

    It is the mean of `megabatch.clip_loss(x, y, scale, symmetric=False)` and of that from the first B rows of y to x.
    own (R, B, B): whether a hard negative is the positive of another pair of the batch, for which it then does not count.
    """
    batch = x.shape[1]
    similarity = torch.bmm(x, y.mT)
    logits = similarity * scale[:, None, None]
    columns = logits[:, :, :batch].softmax(1)
    logits[:, :, batch:].masked_fill_(own, -math.inf)
    slope = logits.softmax(2)
    slope[:, :, :batch].add_(columns)
    slope.mul_(0.5 / batch)
    slope.diagonal(dim1=1, dim2=2).sub_(1 / batch)
    return _through_logits(x, y, similarity, scale, slope)


def _through_logits(x: Tensor, y: Tensor, similarity: Tensor, scale: Tensor, slope: Tensor) -> LossGradients:
    scaled = slope * scale[:, None, None]
    return LossGradients(torch.bmm(scaled, y), torch.bmm(scaled.mT, x), (slope * similarity).sum((1, 2)), slope.sum((1, 2)))


def _clip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, smoothing: float) -> Tensor:
    return megabatch.clip_loss(x, y, scale, label_smoothing=smoothing, group=None)


def _siglip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, smoothing: float) -> Tensor:
    return megabatch.siglip_loss(x, y, scale, bias, group=None)


OBJECTIVES = {
    "clip": Objective(1 / 0.07, 0.0, clip_gradients_stacked, _clip),
    "siglip": Objective(10.0, -10.0, siglip_gradients_stacked, _siglip),
}


def loss_gradients(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, cell: Cell, own: Tensor | None = None) -> LossGradients:
    """Return the gradients of every run's own loss. own: with hard negatives, see `hard_gradients_stacked`."""
    if own is not None:
        return hard_gradients_stacked(x, y, scale, own)
    objective = OBJECTIVES[cell.loss]
    if cell.batch <= STACKED:
        return objective.stacked(x, y, scale, bias, cell.smoothing)
    # The kernels read bfloat16 embeddings; similarities and sums are float32.
    narrow = torch.bfloat16 if x.is_cuda else x.dtype
    gradients = []
    for run in zip(x.to(narrow), y.to(narrow), scale, bias, strict=True):
        inputs = [t.detach().requires_grad_() for t in run]
        found = torch.autograd.grad(objective.loss(*inputs, cell.smoothing), inputs, allow_unused=True)
        # clip_loss does not use the bias.
        gradients.append([torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)])
    stacked = [torch.stack(one) for one in zip(*gradients, strict=True)]
    return LossGradients(stacked[0].to(x.dtype), stacked[1].to(y.dtype), stacked[2], stacked[3])


class Weights(NamedTuple):
    """Weights of a stack. x, y: [first (R, F, H), offset (R, 1, H), *blocks (R, H, H), last (R, H, D)]. log_scale, bias: (R)."""

    x: list[Tensor]
    y: list[Tensor]
    log_scale: Tensor
    bias: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self.x, *self.y, self.log_scale, self.bias]


def new_weights(features: Features, cell: Cell, seeds: list[int], start: Weights | None, device: torch.device) -> Weights:
    """Return initial weights: random ones that depend on the seed alone, or those of `start` for a tower of the same shapes."""
    size, objective = SIZES[cell.size], OBJECTIVES[cell.loss]
    different = sorted(set(seeds))
    run = torch.tensor([different.index(seed) for seed in seeds], device=device)
    sides = []
    for number, side in enumerate((features.x, features.y)):
        inputs, hidden = side.values.shape[1], size.hidden
        shapes = [(inputs, hidden), (1, hidden), *[(hidden, hidden)] * size.blocks, (hidden, size.width)]
        pretrained = None if start is None else (start.x, start.y)[number]
        if pretrained is not None and [tuple(t.shape[1:]) for t in pretrained] == shapes:
            sides.append([t[:1].expand(len(seeds), -1, -1).clone() for t in pretrained])
            continue
        drawn = [torch.stack([_initial(shape, seed, number, i) for seed in different]) for i, shape in enumerate(shapes)]
        sides.append([t.to(device)[run] for t in drawn])
    scale = torch.full((len(seeds),), math.log(objective.scale), device=device)
    return Weights(sides[0], sides[1], scale, torch.full_like(scale, objective.bias))


def _initial(shape: tuple[int, int], seed: int, side: int, layer: int) -> Tensor:
    if shape[0] == 1:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(stable_hash(seed, side, layer))
    return torch.randn(shape, generator=generator) / math.sqrt(shape[0])


def encode(weights: list[Tensor], values: Tensor, factor: Tensor) -> Tensor:
    """Return embeddings (R, B, D) of features (R, B, F), with norm 1 and mean 0."""
    hidden = F.gelu(torch.bmm(values, weights[0]) * factor + weights[1])
    for block in weights[2:-1]:
        hidden = hidden + F.gelu(torch.bmm(F.layer_norm(hidden, hidden.shape[-1:]), block))
    output = torch.bmm(F.layer_norm(hidden, hidden.shape[-1:]), weights[-1])
    # One kernel, where F.normalize takes three forward and six backward.
    return F.layer_norm(output, output.shape[-1:], eps=1e-12) * output.shape[-1] ** -0.5


def rate_table(steps: int, warm_up_share: float = WARM_UP) -> Tensor:
    """Return for each step the share of the peak rate and the bias corrections 1 / (1 - beta^t) of both moments: (steps, 3)."""
    step = torch.arange(1, steps + 1, dtype=torch.float64)
    warm_up = max(1.0, warm_up_share * steps)
    cosine = 0.5 + 0.5 * torch.cos(math.pi * ((step - warm_up) / max(1.0, steps - warm_up)).clamp(0, 1))
    share = torch.minimum(step / warm_up, cosine)
    return torch.stack([share, *(1 / (1 - beta**step) for beta in BETAS)], 1).float()


def update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, rates: Tensor, now: Tensor, decay: float) -> None:
    """Take one AdamW step in place. rates: (R) peak rates. now: (3) row of `rate_table`."""
    if weight.is_cuda:
        from benchmarks.study.adamw import launch

        launch(weight, gradient.contiguous(), mean, square, rates, now, decay)
        return
    shape = (-1, *[1] * (weight.dim() - 1))
    rate = (rates * now[0]).view(shape)
    mean.lerp_(gradient, 1 - BETAS[0])
    square.lerp_(gradient.square(), 1 - BETAS[1])
    weight.mul_(1 - rate * decay).sub_(rate * (mean * now[1]) / ((square * now[2]).sqrt() + EPSILON))


def noise_batches(cell: Cell) -> int:
    """Return the batches between which the noise of a cell's gradients is measured at one point."""
    return max(2, min(NOISE_BATCHES, cell.steps // NOISE_STEPS))


class Stack:
    """Several runs of a cell on a device, one for each (rate, seed). negatives: (training pairs) the hard negative of each pair."""

    def __init__(
        self,
        cell: Cell,
        rates: list[float],
        seeds: list[int],
        features: Features,
        start: Weights | None,
        negatives: Tensor | None = None,
    ) -> None:
        if (negatives is not None) != (cell.negatives > 0) or (cell.negatives and (cell.loss, cell.smoothing) != ("clip", 0.0)):
            raise ValueError(
                f"{cell} has negatives={cell.negatives}; hard negatives need mined ones, the loss clip and no smoothing, and other"
                " cells take none"
            )
        device = features.x.values.device
        self._negatives = negatives
        self.cell, self.features, self.seeds, self.device = cell, features, seeds, device
        self.weights = new_weights(features, cell, seeds, start, device)
        self._moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in self.weights.tensors()]
        self._rates = torch.tensor(rates, device=device)
        self._table = rate_table(cell.steps, cell.warm_up).to(device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self.graph_steps = max(1, min(GRAPH_STEPS, GRAPH_PAIRS // cell.batch, cell.steps // 4))
        self._rows = torch.zeros(self.graph_steps, len(seeds), cell.batch, dtype=torch.int64, device=device)

    def train(self, noise_at: Sequence[int] = ()) -> str | None:
        """Take all steps. Return None, or why the steps were not captured on CUDA.

        noise_at: the steps after which to measure the noise of the gradient, into `self.noise`; up to `graph_steps` later.
        """
        self.noise: list[list[NoisePoint]] = [[] for _ in self.seeds]
        waiting = list(noise_at)
        replay, reason = None, None
        if self.device.type == "cuda":
            try:
                replay = self._capture()
            except Exception as error:
                reason = repr(error)[:300]
                if self.cell.steps > MOST_EAGER_STEPS:
                    raise
        done = 0
        for rows in self._batches():
            if replay is not None and len(rows) == self.graph_steps:
                self._rows.copy_(rows)
                replay()
            else:
                for one in rows:
                    self._take(one)
            done += len(rows)
            if waiting and done >= waiting[0]:
                waiting = [step for step in waiting if step > done]
                for points, found in zip(self.noise, self._noise(done), strict=True):
                    points.append(NoisePoint(done, found))
        assert done == self.cell.steps
        return reason

    def _take(self, rows: Tensor) -> None:
        """Take one step on rows (R, B) of the training pairs."""
        gradients = self._gradients(rows)
        now = self._table.index_select(0, self._step).view(-1)
        for weight, gradient, state in zip(self.weights.tensors(), gradients, self._moments, strict=True):
            decay = WEIGHT_DECAY if weight.dim() == 3 and weight.shape[1] > 1 else 0.0
            update(weight, gradient, *state, self._rates, now, decay)
        self.weights.log_scale.clamp_(max=math.log(MAX_SCALE))
        self._step.add_(1)

    def _gradients(self, rows: Tensor) -> list[Tensor]:
        """Return the gradients of all weights on rows (R, B) of the training pairs, in the order of `Weights.tensors`."""
        leaves = Weights(
            [t.detach().requires_grad_() for t in self.weights.x],
            [t.detach().requires_grad_() for t in self.weights.y],
            self.weights.log_scale,
            self.weights.bias,
        )
        y_rows, own = rows, None
        if self._negatives is not None:
            hard = self._negatives[rows]
            y_rows, own = torch.cat([rows, hard], 1), rows[:, :, None] == hard[:, None]
        with torch.enable_grad():
            x, y = encode(leaves.x, *_inputs(self.features.x, rows)), encode(leaves.y, *_inputs(self.features.y, y_rows))
        scale = self.weights.log_scale.exp().clamp(max=MAX_SCALE)
        found = loss_gradients(x.detach(), y.detach(), scale, self.weights.bias, self.cell, own)
        gradients = torch.autograd.grad((x, y), (*leaves.x, *leaves.y), (found.x, found.y))
        return [*gradients, found.scale * scale, found.bias]

    def _noise(self, step: int) -> list[Moments | None]:
        """Return the moments of every run's gradient between independent batches at these weights.

        `megabatch noise` measures losses that compare samples in the same way: from the squared norms of the gradients of whole
        batches, each with its own negatives, and of their mean.
        """
        count = noise_batches(self.cell)
        sums: list[Tensor] = []
        squares = []
        for rows in self._drawn("noise", step, count):
            gradients = self._gradients(rows)
            squares.append(_squares(gradients))
            if sums:
                torch._foreach_add_(sums, gradients)
            else:
                sums = [g.clone() for g in gradients]
        wholes = (_squares(sums) / count**2).tolist()
        found: list[Moments | None] = []
        for whole, own in zip(wholes, torch.stack(squares, 1).tolist(), strict=True):
            micros = [Micro(square, self.cell.batch, 1 / count) for square in own]
            found.append(moments(micros, whole) if math.isfinite(whole + sum(own)) else None)
        return found

    def _drawn(self, name: str, step: int, count: int) -> Iterator[Tensor]:
        """Yield `count` batches (R, B) that are no part of the training, of different pairs while there are enough."""
        different, fits = sorted(set(self.seeds)), self.features.train // self.cell.batch
        for number in range(count):
            if number % fits == 0:
                orders = {seed: self._order(seed, name, step, number // fits).view(fits, -1) for seed in different}
            yield torch.stack([orders[seed][number % fits] for seed in self.seeds]).to(self.device)

    def _order(self, *parts: str | int) -> Tensor:
        """Return the training pairs in a random order that depends on the parts, without those left over from whole batches."""
        generator = torch.Generator().manual_seed(stable_hash(*parts))
        whole = self.features.train // self.cell.batch * self.cell.batch
        return torch.randperm(self.features.train, generator=generator)[:whole]

    def _capture(self) -> Callable[[], None]:
        """Capture `graph_steps` steps. The steps before the capture, which compile kernels, are undone."""
        state = [*self.weights.tensors(), *(t for pair in self._moments for t in pair), self._step]
        before = [t.clone() for t in state]
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._take(self._warm_up_rows())
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for step in range(self.graph_steps):
                    self._take(self._rows[step])
            return graph.replay
        finally:
            torch.cuda.synchronize()
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)

    def _warm_up_rows(self) -> Tensor:
        rows = torch.arange(self.cell.batch, device=self.device)
        return rows.expand(len(self.seeds), -1).contiguous()

    def _batches(self) -> Iterator[Tensor]:
        """Yield (steps, R, B) rows of training pairs: up to `graph_steps` steps at once. No batch has a pair twice.

        A run's rows depend on its seed alone. The rest of an epoch that is smaller than a batch is left out.
        """
        different = sorted(set(self.seeds))
        run = torch.tensor([different.index(seed) for seed in self.seeds], device=self.device)
        left, epoch = self.cell.steps, 0
        batches = self.features.train // self.cell.batch
        kept: Tensor | None = None
        while left:
            orders = [self._order(seed, epoch) for seed in different]
            epoch += 1
            # (steps, different seeds, B)
            rows = torch.stack(orders).view(len(different), batches, self.cell.batch).transpose(0, 1).to(self.device)
            rows = rows if kept is None else torch.cat([kept, rows])
            while left and (len(rows) >= self.graph_steps or len(rows) >= left):
                part = rows[: min(left, self.graph_steps)]
                yield part[:, run]
                rows, left = rows[len(part) :], left - len(part)
            kept = rows


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of each run's gradient (R), summed in float64."""
    return torch.stack([g.flatten(1).double().square().sum(1) if g.dim() > 1 else g.double().square() for g in gradients]).sum(0)


def _inputs(side: Side, rows: Tensor) -> tuple[Tensor, Tensor]:
    # Eight features at once: a gather costs time for each element, not for each byte.
    return side.values.view(torch.int64)[rows].view(torch.uint8).float(), side.factor[rows]


@torch.no_grad()
def mine(weights: Weights, features: Features) -> Tensor:
    """Return for each training pair the pair whose y is most similar to its x by the first run, other than its own."""
    rows = torch.arange(features.train, device=features.x.values.device)
    x, y = embed(weights, 0, features, rows)
    nearest = []
    for part in rows.split(max(1, MINED // features.train)):
        similarity = x[part] @ y.T
        similarity.scatter_(1, part[:, None], -math.inf)
        nearest.append(similarity.argmax(1))
    return torch.cat(nearest)


def embed(weights: Weights, run: int, features: Features, rows: Tensor) -> list[Tensor]:
    """Return the embeddings of both sides of rows by one run."""
    sides = []
    for own, side in ((weights.x, features.x), (weights.y, features.y)):
        one = [t[run : run + 1] for t in own]
        sides.append(torch.cat([encode(one, *_inputs(side, part[None]))[0] for part in rows.split(EVALUATED)]))
    return sides


@torch.no_grad()
def evaluate(weights: Weights, features: Features, first: int, count: int) -> list[Quality]:
    """Return the quality of every run on `count` pairs from number `first` on. A run that diverged has the worst ranks."""
    results = []
    rows = torch.arange(first, first + count, device=features.x.values.device)
    for run in range(len(weights.log_scale)):
        sides = embed(weights, run, features, rows)
        # The towers' products are rounded to TF32 on CUDA; two similarities that are nearly equal should not be.
        similarity = sides[0].double() @ sides[1].double().T
        positive = similarity.diagonal()
        # Not "greater": NaN must not be counted as a hit, and ties count against the run.
        ranks = [(~(similarity < positive[:, None])).sum(1) - 1, (~(similarity < positive[None])).sum(0) - 1]
        results.append(Quality(torch.stack(ranks).cpu()))
    return results


def train(
    cell: Cell,
    rates: list[float],
    seeds: list[int],
    features: Features,
    start: Weights | None = None,
    negatives: Tensor | None = None,
    measure_noise: bool = False,
) -> Trained:
    """Train one run for each (rate, seed) and return the results.

    start: pretrained weights. negatives: the hard negative of each training pair, from `mine`.
    """
    if cell.batch > features.train:
        raise ValueError(
            f"batch {cell.batch} is larger than the {features.train} training pairs of {cell.source}; choose a smaller one"
        )
    began = time.perf_counter()
    stack = Stack(cell, rates, seeds, features, start, negatives)
    not_captured = stack.train([int(share * cell.steps) for share in NOISE_SHARES] if measure_noise else ())
    validation = evaluate(stack.weights, features, features.train, features.validation)
    test = evaluate(stack.weights, features, features.train + features.validation, features.test)
    scale = stack.weights.log_scale.exp().tolist()
    return Trained(validation, test, scale, time.perf_counter() - began, not_captured, stack.weights, stack.noise)
