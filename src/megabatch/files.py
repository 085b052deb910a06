"""Write files atomically: beside the target, flushed to disk, then renamed over it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which replaces `path` when the block ends without an error.

    On an error the temporary file is removed and `path` is left unchanged. The folder must exist. A process that
    is killed leaves the temporary file behind; the next write to `path` overwrites it. A path that is neither a file nor a folder,
    such as /dev/stdout, is yielded itself, because it cannot be replaced.

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
    """Raise ValueError if no file can be written at `path`. Call it before computing what would be lost.

    name: names the path in the message. make_folder: the folder need not exist, because it is created with the file.
    """
    path = Path(path)
    subject = f"{name} is {str(path)!r}"
    try:
        if path.is_dir():
            raise ValueError(f"{subject}: this is a directory; name a file")
        if path.exists() and not path.is_file():
            raise ValueError(f"{subject}: this is not a regular file; name another one")
        if not make_folder and not path.parent.exists():
            raise ValueError(f"{subject}: there is no directory {str(path.parent)!r}; make it, or name a file in another one")
        _check_writable(path.parent)
    except OSError as error:
        raise ValueError(f"{subject}: no file can be written there ({error.strerror}); name another one") from None


def check_folder(path: str | Path, name: str) -> None:
    """Raise ValueError if `path` is not a directory that files can be written to, and cannot become one."""
    try:
        _check_writable(Path(path))
    except OSError as error:
        raise ValueError(
            f"{name} is {str(path)!r}: not a directory that can be written to ({error.strerror}); name another"
        ) from None


def _check_writable(folder: Path) -> None:
    """Raise OSError if no file can be created in `folder` or, if it does not exist, in the nearest directory above it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    # Tried, not queried: permissions do not show a read-only disk, and allow the superuser everything.
    with tempfile.TemporaryFile(dir=folder):
        pass


def partial_of(path: Path) -> Path:
    """Return the name of the temporary file of `path`."""
    return path.with_name(f".{path.name}.partial")
