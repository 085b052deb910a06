"""Panels of a similarity matrix consist of whole tiles, and fit into the workspace unless a tile does not."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from megabatch.tiles.panels import panel_size

LENGTHS = st.integers(1, 100_000)


@example(19, 27, (16, 32), 361, None)
@example(12_780, 178, (256, 128), 33_988, None)
@given(LENGTHS, LENGTHS, st.sampled_from([(64, 128), (128, 128), (16, 16), (256, 128)]), st.integers(1, 2**30), st.none() | LENGTHS)
def test_panels_are_whole_tiles_that_fit(rows, columns, tile, cells, max_columns):
    height, width = panel_size(rows, columns, tile, cells, max_columns)
    assert height % tile[0] == 0 and width % tile[1] == 0
    assert height - tile[0] < rows and width - tile[1] < columns
    if height > tile[0] or width > tile[1]:
        assert min(height, rows) * min(width, columns) <= cells
    if max_columns is not None:
        assert min(width, columns) <= max(max_columns, tile[1])
