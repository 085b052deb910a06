"""Tables: boxes on a terminal, plain columns in a pipe, and never a control character of the data."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from megabatch import cli
from megabatch.reporting.report import Column, Table, text_table
from megabatch.reporting.terminal import plain_table, print_table, print_text, visible

COLUMNS = ["batch", "peak", "note"]
ROWS = [["64", "1 GiB", "x" * 300], ["1,024", "12 GiB", "[bold]no markup[/bold] \\[/b] :smile:"]]
PROGRAM = f"""
from dataclasses import replace
from megabatch.reporting.report import text_table
from megabatch.reporting.terminal import print_table
print_table(replace(text_table({COLUMNS!r}, {ROWS!r}), title="sizes"))
"""


def printed(program: str, *, terminal: bool, **variables: str) -> str:
    """Return what a program prints into a pipe, or on a terminal of 80 columns."""
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    command, env = [sys.executable, "-c", program], {**env, "TERM": "xterm", **variables}
    if not terminal:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=env, stdout=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        found = b""
        try:
            while part := os.read(ours, 65536):
                found += part
        except OSError:
            # Linux reports it when the other side of a terminal is closed.
            pass
    os.close(ours)
    assert process.returncode == 0
    return found.decode("utf-8")


def test_a_pipe_gets_one_line_a_row_without_boxes():
    lines = printed(PROGRAM, terminal=False).splitlines()
    assert lines[0] == "sizes" and len(lines) == 5
    assert lines[1].split() == COLUMNS
    assert lines[3].endswith("x" * 300) and lines[4].endswith("[bold]no markup[/bold] \\[/b] :smile:")
    assert all(line.isascii() for line in lines)
    assert len({line.index(word) for line, word in zip(lines[3:], ("1 GiB", "12 GiB"), strict=True)}) == 1


def test_a_terminal_gets_boxes_unless_it_asks_for_plain_text():
    boxes = printed(PROGRAM, terminal=True)
    assert "━" in boxes and "[bold]no markup[/bold] \\[/b] :smile:" in " ".join(boxes.split())
    plain = printed(PROGRAM, terminal=False)
    for variables in ({"TERM": "dumb"}, {"NO_COLOR": "1"}):
        assert printed(PROGRAM, terminal=True, **variables).replace("\r\n", "\n") == plain


def test_without_rich_a_terminal_gets_plain_columns():
    program = f"import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n{PROGRAM}"
    assert printed(program, terminal=True).replace("\r\n", "\n") == printed(PROGRAM, terminal=False)


@pytest.mark.parametrize("terminal", [False, True])
def test_no_control_character_of_a_cell_is_printed(terminal):
    cells = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066)]
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    print_table(text_table(["a", "b"], [[f"left{cell}", f"{cell}right"] for cell in cells]), console=console)
    print_text("".join(cells), bold=True, item=True, console=console)
    # Bold text is an escape sequence that we print.
    found = out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert not set(cells) & set(found) - {"\n"}
    assert found.count("left") == len(cells) == found.count("right")


def test_visible_leaves_other_letters_alone():
    text = "Ωmega → 画像 é 👩‍🔬 [x]"
    assert visible(text) == text


def test_columns_of_wide_letters_are_aligned():
    columns = [Column("a", "a", kind="word"), Column("b", "b", kind="word")]
    lines = plain_table(columns, [["画像", "1"], ["e\u0301x", "2"], ["word", "3"]]).splitlines()
    assert lines[2] == "画像  1" and lines[3] == "e\u0301x    2" and lines[4] == "word  3"


def test_an_empty_table_has_a_head():
    assert plain_table([Column("a", "a"), Column("b", "bb")], []) == "a  bb\n-  --"


def test_numbers_are_right_aligned_and_details_are_left_out(capsys):
    columns = [Column("size", "size", "{:,}".format), Column("note", "note", kind="word"), Column("more", "more", detail=True)]
    print_table(Table(columns, [{"size": 5, "note": "a", "more": 1}, {"size": 1024, "note": None, "more": 2}]))
    assert capsys.readouterr().out.splitlines() == [" size  note", "-----  ----", "    5  a", "1,024"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_lacks_is_escaped(encoding, tmp_path):
    (tmp_path / "run.toml").write_text('out = "runs/画像 →"\n[schedule]\nsteps = 1\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "megabatch", "train", "--show", str(tmp_path / "run.toml")],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"runs/\\u753b\\u50cf \\u2192" in done.stdout


def test_an_audit_prints_no_control_character_of_its_file(tmp_path, capsys):
    options = "--batch-size 8192 --warmup 0 --train-num-samples 10000000 --epochs 30"
    command = f"python -m open_clip_train.main --train-data 'a\x1b]0;owned\x07.tar' {options}\n"
    (tmp_path / "open_clip.sh").write_text(command)
    cli.main(["audit", str(tmp_path / "open_clip.sh")])
    told = capsys.readouterr()
    assert "\\x1b]0;owned" in told.out and "\x1b" not in told.out + told.err
