"""Noise as one HTML page that loads nothing and runs nothing, in the style of a run's report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ... import config
from ...measurements import Measured
from ...reporting.markup import LONG, block, document, figure, section, table, text
from .branch import TOLERANCE, Branch
from .pictures import branch_picture, course_picture
from .show import POINTS, headline, noise_of, point_rows, sentences

BRANCHES = ("batch", "held-out loss", "above the smallest", "noise of that", "")


def page(result: Measured, branches: Sequence[Branch] = ()) -> str:
    """The page. Names and paths of the run come from outside: all of them are escaped."""
    found = noise_of(result)
    body = f"""<h1 class="faint">{text(result.device)} · {text(result.date)}</h1>
<p class="headline">{text(headline(result), LONG)}</p>
{_words(result)}{_course(result)}{_branches(branches)}{_settings(result)}"""
    return document(f"batch {found.batch:,} · megabatch noise", body)


def _words(result: Measured) -> str:
    return "<ul>\n" + "".join(f"<li>{text(line, LONG)}</li>\n" for line in sentences(result)) + "</ul>\n"


def _course(result: Measured) -> str:
    drawn = figure(course_picture, result, "the critical batch against the step, with its interval and the run's batch")
    return section("Over training", f'<div class="wide">{drawn}</div>\n', table(POINTS, point_rows(result)))


def _branches(branches: Sequence[Branch]) -> str:
    if not branches:
        return ""
    rows = [
        [f"{each.batch:,}", *(_loss(value) for value in (each.loss, each.difference, each.noise)), "" if each.fine else "loses"]
        for each in branches
    ]
    drawn = figure(branch_picture, branches, "held-out loss of branches against their batch")
    intro = (
        "<p>From one checkpoint, each batch was trained on the same samples with its rate scaled, in proportion for SGD and by the"
        f" root for others. A batch loses if it ends above the smallest by more than {TOLERANCE:g} and the noise of the comparison:"
        " half of its 95 % interval, by repeats on other samples.</p>\n"
    )
    if branches[-1].noise > TOLERANCE:
        intro += (
            '<p class="warning">Here the noise is the larger of the two: longer branches or more of them would tell more.</p>\n'
        )
    return section("Branches", intro, f'<div class="wide">{drawn}</div>\n', table(BRANCHES, rows))


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _settings(result: Measured) -> str:
    return section("The run that was measured", block(config.as_toml(config.build(result.run))))
