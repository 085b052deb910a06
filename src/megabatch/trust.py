"""Which values of a run name code, and the check that the caller trusts them."""

from __future__ import annotations

from .config import Run, is_torch_optimizer
from .towers import names_code


def callables(run: Run) -> dict[str, str]:
    """Return the keys of a run whose values name code, "package.module:function", with these values.

    Models of libraries ("timm:…") and PyTorch's own optimizers ("torch.optim:NAdam") are chosen from a fixed set and are not code.

    >>> from megabatch.config import build
    >>> callables(build({"x": {"name": "my.towers:small"}, "y": {"name": "timm:vit_tiny_patch16_224"}, "schedule": {"steps": 1}}))
    {'x.name': 'my.towers:small'}
    """
    named = {f"{side}.name": tower.name for side, tower in (("x", run.x), ("y", run.y)) if names_code(tower.name)}
    if ":" in run.optimizer.name and not is_torch_optimizer(run.optimizer.name):
        named["optimizer.name"] = run.optimizer.name
    return named


def require_trust(run: Run, trust_code: bool) -> None:
    """Raise ValueError if a run names code and the caller has not allowed it to run.

    Call it before anything that the run names is imported. `trust_code` comes from the command line or from the calling program,
    never from a file: a file must not be able to grant itself the right to execute code.
    """
    named = callables(run)
    if named and not trust_code:
        key, name = next(iter(named.items()))
        raise ValueError(
            f"{key} is {name!r}: it names code, which runs only with --trust-code (trust_code=True in Python). Pass it if you trust"
            " the authors of the configuration and of that code, or name a built-in model or optimizer"
        )
