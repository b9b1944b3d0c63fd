"""What the dynamic loader reads of our binaries: run paths, and which libraries they need.

python3 check_binaries.py runpath FOLDER...    every ELF file below: no element of a run path may
                                               be empty, relative or writable by others
python3 check_binaries.py needed FILE NAME...  needs no library but those whose names begin so
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ELF = b"\x7fELF"


def binaries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.suffix in (".o", ".a"):
            continue
        with path.open("rb") as file:
            if file.read(4) == ELF:
                yield path


def dynamic_section(path: Path) -> str:
    done = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True)
    return done.stdout


def findings(element: str, origin: Path) -> str | None:
    """What is wrong with an element of the run path of a binary in the folder `origin`, or None."""
    if not element:
        return "an empty element, which is the current directory"
    folder = Path(re.sub(r"^\$ORIGIN|^\$\{ORIGIN\}", str(origin), element))
    if not folder.is_absolute():
        return f"{element}, which is relative to the current directory"
    if not folder.exists():
        # Someone else could make it: then the nearest folder that exists decides.
        folder = next(parent for parent in folder.parents if parent.exists())
    about = folder.stat()
    if about.st_mode & stat.S_IWOTH:
        return f"{element}: everybody may write to {folder}"
    if about.st_mode & stat.S_IWGRP and about.st_gid not in (0, os.getegid()):
        return f"{element}: the group {about.st_gid} may write to {folder}"
    if about.st_uid not in (0, os.geteuid()):
        return f"{element}: {folder} belongs to another user"
    return None


def check_runpath(folders: list[str]) -> list[str]:
    found, checked, paths = [], 0, 0
    for path in (p for folder in folders for p in binaries(Path(folder))):
        checked += 1
        for run_path in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic_section(path)):
            paths += 1
            for element in run_path.split(":"):
                if wrong := findings(element, path.parent.resolve()):
                    found.append(f"{path}: run path has {wrong}")
    print(f"{checked} binaries, {paths} run paths")
    return found if paths else ["no binary has a run path: nothing was checked"]


def check_needed(arguments: list[str]) -> list[str]:
    path, allowed = Path(arguments[0]), tuple(arguments[1:])
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic_section(path))
    print(f"{path.name} needs {' '.join(needed)}")
    if not needed:
        return [f"{path} needs nothing: it was not read"]
    return [f"{path.name} needs {n}" for n in needed if not n.startswith(allowed)]


def main() -> int:
    check = {"runpath": check_runpath, "needed": check_needed}[sys.argv[1]]
    found = check(sys.argv[2:])
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
