"""Each check of the tree notices a planted offence, and finds nothing in a clean tree."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tree" / "check_tree.py"

CLEAN = {
    "include/a.h": "int a(void);\n",
    "plan/b.c": '#include "include/a.h"\nint b(void) {\n  return 1;\n}\n',
    "plan/CMakeLists.txt": "trefoil_objects(ep_plan SOURCES b.c)\n",
    "ref/c.c": '#include "plan/../include/a.h"\n/* abort() is never called */\n',
    "README.md": "See [the header](include/a.h).\n",
    "tools/run.sh": "#!/bin/sh\necho ok\n",
}

OFFENCES = [
    ("layers", "plan/d.c", '#include "ref/c.c"\n', "plan/ may not use ref/"),
    ("layers", "models/d.c", '#include "../ref/c.c"\n', "models/ may not use ref/"),
    ("layers", "ref/CMakeLists.txt", "x(LIBS ep_models)\n", "ref/ may not use models/"),
    ("names", "ref/b.c", "\n", "the name is taken by plan/b.c"),
    ("names", "ref/CamelCase.c", "\n", "lower_snake"),
    ("length", "ref/long.c", "\n" * 801, "over 800 lines"),
    ("words", "ref/e.c", "/* TO" + "DO */\n", "unfinished"),
    ("words", "tools/x.sh", "cd /ho" + "me/me\n", "a path of one machine"),
    ("space", "ref/e.c", "int x; \n", "blanks at the end"),
    ("space", "ref/e.c", "\tint x;\n", "a tab"),
    ("space", "ref/e.c", "int x;", "no newline"),
    ("space", "ref/e.c", "/* " + "x" * 120 + " */\n", "columns"),
    ("quiet", "ref/e.c", "void f(void) { abort(); }\n", "calls abort"),
    ("quiet", "host/e.c", 'void f(void) {\n  printf("x");\n}\n', "host/e.c:2: library code calls"),
    ("shell", "tools/bad.sh", "if true; then\n", "syntax error"),
    ("links", "docs/x.md", "[gone](gone.md)\n", "leads nowhere"),
    ("places", "docs/x.md", "`ref/gone.c`\n", "docs/x.md:1: there is no ref/gone.c"),
    ("places", "docs/x.md", "`gone` in `b.c`, `b` in `plan/b.c`\n", "b.c has no gone"),
]


def check(root: Path, name: str) -> tuple[int, str]:
    command = [sys.executable, str(TOOL), str(root), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(("name", "path", "text", "finding"), OFFENCES)
def test_offence_is_found(tmp_path, name: str, path: str, text: str, finding: str) -> None:
    plant(tmp_path, CLEAN)
    assert check(tmp_path, name) == (0, f"{name}: nothing found\n")
    plant(tmp_path, {path: text})
    code, output = check(tmp_path, name)
    assert code == 1
    assert finding in output
