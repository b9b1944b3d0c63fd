"""Files that verbs write: under another name in the same folder, renamed when they are whole.

A failure, a full disk or a signal leaves what was there before, and nothing else. A device or a
pipe is written as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class OutputError(OSError):
    """An output cannot be written; the text says which and why."""

    def __init__(self, path: Path, why: OSError) -> None:
        super().__init__(why.errno, why.strerror or str(why))
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: cannot be written: {self.strerror}"


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def check_file(path: Path) -> None:
    """Raises OutputError where the file could not be written; for before the work begins."""
    if path.is_dir():
        raise OutputError(path, IsADirectoryError(21, "is a folder"))
    if _is_special(path):
        return
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, os.strerror(13))
        with tempfile.TemporaryFile(dir=_existing(path.parent), prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise OutputError(path, error) from None


def check_folder(folder: Path) -> None:
    """The same of files in a folder, which need not be there yet."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(folder, NotADirectoryError(20, "is not a folder"))
    try:
        check_file(folder / "file")
    except OutputError as error:
        raise OutputError(folder, error) from None


def _existing(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes the folder and those above; a failure removes what was made."""
    missing = []
    at = folder
    while not at.exists() and at != at.parent:
        missing.append(at)
        at = at.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for made in missing:
            try:
                made.rmdir()
            except OSError:
                break
        raise


@contextmanager
def open_whole(path: Path, mode: str = "w", **how: Any) -> Iterator[IO[Any]]:
    """As open() for writing; the file takes its place when the block ends without an exception."""
    if "b" not in mode:
        how.setdefault("encoding", "utf-8")
    unfinished: Path | None = None
    try:
        if _is_special(path):
            with path.open(mode, **how) as file:
                yield file
            return
        target = path.resolve()  # a link stays one
        with _made(target.parent):
            descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            unfinished = Path(name)
            with os.fdopen(descriptor, mode, **how) as file:
                yield file
            unfinished.chmod(_mode_of(target))
            unfinished.replace(target)
    except OSError as error:
        raise error if isinstance(error, OutputError) else OutputError(path, error) from None
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def _mode_of(path: Path) -> int:
    if path.exists():
        return path.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_whole(path: Path, text: str) -> None:
    with open_whole(path) as file:
        file.write(text)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into; its files move to `folder` when the block ends well."""
    try:
        with _made(folder):
            staging = Path(tempfile.mkdtemp(dir=folder, prefix=".unfinished-"))
            try:
                yield staging
                for path in sorted(staging.iterdir()):
                    path.replace(folder / path.name)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise error if isinstance(error, OutputError) else OutputError(folder, error) from None
