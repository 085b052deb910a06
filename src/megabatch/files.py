"""Files that are replaced whole or not at all: written beside the target, flushed to the disk, then renamed over it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which takes the place of `path` when the block ends without an error.

    On an error the temporary file is removed and what was at `path` before stays as it was. The folder must exist. A process that
    is killed leaves the temporary file behind; the next write to `path` overwrites it. A path that is neither a file nor a folder,
    such as /dev/stdout, is yielded itself: it cannot be replaced.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "result.json"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("{}")
    >>> target.read_text()
    '{}'
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    temporary = partial_of(path)
    try:
        yield temporary
        # A rename can reach the disk before the data does, and would leave an empty file after a power failure.
        # Windows flushes only files that are open for writing.
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Replace the file at `path` by one that holds `text` in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_file(path: str | Path, name: str, *, make_folder: bool = False) -> None:
    """Raise ValueError where no file can be written at `path`, before anything is computed that would be lost.

    name: what the path is called in the message. make_folder: the folder need not exist, since it is made with the file.
    """
    path = Path(path)
    shown = f"{name} is {str(path)!r}"
    try:
        if path.is_dir():
            raise ValueError(f"{shown}: this is a directory; name a file")
        if path.exists() and not path.is_file():
            raise ValueError(f"{shown}: this is not a regular file; name another one")
        if not make_folder and not path.parent.exists():
            raise ValueError(f"{shown}: there is no directory {str(path.parent)!r}; make it, or name a file in another one")
        _check_writable(path.parent)
    except OSError as error:
        raise ValueError(f"{shown}: no file can be written there ({error.strerror}); name another one") from None


def check_folder(path: str | Path, name: str) -> None:
    """Raise ValueError where `path` is not a directory that files can be written to, and cannot become one."""
    try:
        _check_writable(Path(path))
    except OSError as error:
        raise ValueError(
            f"{name} is {str(path)!r}: not a directory that can be written to ({error.strerror}); name another"
        ) from None


def _check_writable(folder: Path) -> None:
    """Raise OSError where no file can be made in `folder` or, while it does not exist, in the nearest directory above it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    # Tried rather than asked: permissions do not tell of a read-only disk, and let the superuser do everything.
    with tempfile.TemporaryFile(dir=folder):
        pass


def partial_of(path: Path) -> Path:
    """Return the name of the temporary file of `path`."""
    return path.with_name(f".{path.name}.partial")
