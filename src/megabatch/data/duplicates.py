"""Which rows are duplicates of each other: those with an equal x or an equal y, such as the captions of one image."""

from __future__ import annotations

from torch import Tensor


def join_ids(x_ids: Tensor, y_ids: Tensor) -> Tensor:
    """Return one id per row, equal for rows that share x or y, directly or through other rows. Without a shared x it is y's.

    x_ids, y_ids: one integer for each row, then, in y_ids alone, for each further y (hard negatives). The result, on the host, has
    the form of y_ids: a further y gets the id of the rows with that y.

    Losses know one id per row, so that sharing has to be transitive: an image with captions a and b, and another one with b and c,
    are one group, and neither is a negative of a or c.

    >>> from torch import tensor
    >>> join_ids(tensor([7, 7, 8]), tensor([3, 2, 5, 3])).tolist()
    [2, 2, 5, 2]
    """
    images, captions = x_ids.tolist(), y_ids.tolist()
    if len(set(images)) == len(images):
        return y_ids.cpu()
    # Ids of y that are equal to a smaller one.
    smaller: dict[int, int] = {}

    def smallest(y: int) -> int:
        while y in smaller:
            # Shorten the path for the next search.
            smaller[y] = smaller.get(smaller[y], smaller[y])
            y = smaller[y]
        return y

    first: dict[int, int] = {}
    for image, caption in zip(images, captions, strict=False):
        ends = smallest(first.setdefault(image, caption)), smallest(caption)
        if ends[0] != ends[1]:
            smaller[max(ends)] = min(ends)
    return y_ids.new_tensor([smallest(caption) for caption in captions], device="cpu")
