"""Atomic writes: a file holds its old content or all of the new one, never a part of it."""

from __future__ import annotations

import pytest

from megabatch.files import partial_of, replacing, write_text


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.json"
    write_text(path, "before")
    with pytest.raises(OSError, match="No space left"), replacing(path) as temporary:
        temporary.write_text("half of what")
        raise OSError("No space left on device")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_the_old_file_is_whole_until_the_new_one_is(tmp_path):
    path = tmp_path / "result.json"
    write_text(path, "before")
    with replacing(path) as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"


def test_a_temporary_file_left_by_a_killed_process_is_overwritten(tmp_path):
    path = tmp_path / "result.json"
    partial_of(path).write_text("left by a process that was killed")
    write_text(path, "whole")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
