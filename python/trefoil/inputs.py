"""Files that a user names: regular ones alone, so nothing is waited for and nothing is endless."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST = 256 << 20


def read_text(path: Path, most: int = MOST) -> str:
    """The text. OSError: it cannot be read, is no regular file, or is larger than `most` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read().decode("utf-8")
    finally:
        os.close(descriptor)


def read_json(path: Path, refusal: type[Exception]) -> Any:
    """What the file holds. `refusal`, with a sentence: it cannot be read, or is no JSON."""
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise refusal(f"{path}: not JSON: {error}") from error
