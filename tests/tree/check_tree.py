"""Checks of the source tree itself: layers, names, lengths, words, white space, format, exports.

    python3 check_tree.py ROOT CHECK [ARGUMENTS]

Each check prints one line a finding, "path:line: what", and exits 1 if there is one; 77 with the
reason if it cannot run here. Needs only the standard library.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# A folder includes headers only of itself or of folders of a lower level (docs/design.md).
LEVELS = {
    "host/include": -1,  # the CUDA runtime's and NCCL's own headers, for machines without them
    "include": 0,
    "plan": 1,
    "net": 1,
    "ref": 2,
    "models": 2,
    "kernels": 2,
    "host": 2,
    "api": 3,
    "sim": 3,
    "validate": 4,
    "python": 4,
    "cli": 5,
    "tests": 5,
    "docs": 5,
    "tools": 5,
}
SOURCES = {".c", ".h", ".cu", ".cuh", ".cc", ".cpp", ".py", ".sh"}
C_FAMILY = {".c", ".h", ".cu", ".cuh", ".cc", ".cpp"}
TEXT = SOURCES | {".md", ".txt", ".cmake", ".in", ".json", ".toml", ".map", ".html", ".svg", ""}
MAX_LINES = 800
README_WORDS = 900
MAX_COLUMNS = 110  # clang-format holds code to 100; a comment may run over by a word
FOREIGN = {"cuda.h"}  # headers of others that documents name
LIBRARY_FOLDERS = ("plan/", "net/", "ref/", "models/", "host/", "api/", "kernels/", "sim/")


def tracked(root: Path) -> list[Path]:
    """Files of the tree, relative: what git knows or would add, else all but build products."""
    if shutil.which("git") and (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            names = [Path(n) for n in done.stdout.splitlines()]
            return sorted(n for n in names if (root / n).is_file())
    skip = {"build", ".venv", "out", ".git", ".cache", "__pycache__"}
    found = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
    return sorted(p for p in found if not skip.intersection(p.parts))


def lines_of(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    text = (root / path).read_bytes().decode("utf-8", errors="replace")
    yield from enumerate(text.split("\n"), start=1)


def folder_of(path: Path) -> str | None:
    """The folder of LEVELS that a path lies in, the longest that fits."""
    parts = path.parts[:-1]
    for n in range(len(parts), 0, -1):
        if (name := "/".join(parts[:n])) in LEVELS:
            return name
    return None


def resolve(root: Path, source: Path, name: str) -> Path | None:
    """The file of the tree that #include "name" means, relative to the root, or None."""
    bases = (source.parent, Path(), Path("include"), Path("host/include"), Path("tests"))
    for base in bases:
        candidate = (root / base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root)
    return None


def may_use(source: str, target: str) -> bool:
    if source == target or LEVELS[target] < LEVELS[source]:
        return True
    return LEVELS[source] == LEVELS[target] == 5  # tests, cli and tools may help each other


def check_layers(root: Path) -> list[str]:
    findings = []
    for path in tracked(root):
        if (folder := folder_of(path)) is None:
            continue
        if path.suffix in C_FAMILY:
            pattern = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]')
        elif path.name == "CMakeLists.txt":
            pattern = re.compile(r"\bep_([a-z]+)\b(?!\.)")
        else:
            continue
        for number, line in lines_of(root, path):
            for name in pattern.findall(line.split("#")[0] if path.suffix == ".txt" else line):
                if path.suffix == ".txt":
                    target = name if name in LEVELS else None
                else:
                    found = resolve(root, path, name)
                    target = folder_of(found) if found else None
                if target and not may_use(folder, target):
                    findings.append(f"{path}:{number}: {folder}/ may not use {target}/ ({name})")
    return findings


def code_of(root: Path, path: Path) -> str:
    """A C source without comments, strings and preprocessor lines other than #define."""
    text = (root / path).read_text()
    text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", blank, text, flags=re.DOTALL)
    return re.sub(r"^[ ]*#[ ]*(?!define)(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.MULTILINE)


def definitions(code: str) -> set[str]:
    """Functions and variables with external linkage, so with a prefix, that a text defines."""
    names = set()
    for line in re.findall(
        r"^(?!static|typedef|struct|enum|extern)[A-Za-z_][^;{}#]*\{", code, re.M
    ):
        if found := re.search(
            r"\b((?:ep|cli|nccl|cuda|trefoil)[A-Z]\w*)\s*(?:\(|(?:\[.*\])*\s*=)", line
        ):
            names.add(found.group(1))
    return names


def strong_components(edges: dict[Path, set[Path]]) -> list[list[Path]]:
    """The sets of more than one node in which each reaches each other."""
    reach: dict[Path, set[Path]] = {}
    for start in edges:
        seen, todo = set(), [start]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reach[start] = seen
    sets = {frozenset({a, *(b for b in reach[a] if a in reach.get(b, ()))}) for a in edges}
    return sorted(sorted(s) for s in sets if len(s) > 1)


def uses_between(root: Path, folder: list[Path]) -> dict[Path, dict[Path, str]]:
    """For each file of a folder the files of it whose functions it names or that it includes."""
    code = {p: code_of(root, p) for p in folder}
    owner = {n: p for p in folder if p.suffix in {".c", ".cu", ".cc"} for n in definitions(code[p])}
    uses: dict[Path, dict[Path, str]] = {p: {} for p in folder}
    for path in folder:
        if path.suffix in {".c", ".cu", ".cc"}:
            for name in set(re.findall(r"\b[A-Za-z_]\w*\b", code[path])) & owner.keys():
                uses[path][owner[name]] = name
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (root / path).read_text(), re.M):
            if (found := resolve(root, path, name)) in code:
                uses[path].setdefault(found, f'"{name}"')
        uses[path].pop(path, None)
    return uses


def check_circles(root: Path) -> list[str]:
    """No file of a library or of the command uses another of its folder that uses it in turn."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for path in tracked(root):
        if path.suffix in C_FAMILY and str(path).startswith(
            (*LIBRARY_FOLDERS, "validate/", "cli/")
        ):
            folders[path.parent].append(path)
    findings = []
    for paths in folders.values():
        uses = uses_between(root, paths)
        for circle in strong_components({p: set(u) for p, u in uses.items()}):
            for path in circle:
                to = ", ".join(f"{q.name} ({uses[path][q]})" for q in circle if q in uses[path])
                findings.append(f"{path}:1: in a circle of {len(circle)} files: it uses {to}")
    return findings


def check_names(root: Path) -> list[str]:
    shared = {"CMakeLists.txt", "README.md", "__init__.py", "__main__.py"}
    findings = []
    seen: dict[str, list[Path]] = defaultdict(list)
    for path in tracked(root):
        if path.name in shared or path.suffix not in SOURCES | {".md"}:
            continue
        # Headers of the emulator and NVTX's take the place of others by having their names.
        if path.is_relative_to("tests/emulator/include") or "nvtx3" in path.parts:
            continue
        # api/cpu and api/gpu are two backends with the same parts.
        backend = str(path.parent) if str(path.parent) in ("api/cpu", "api/gpu") else ""
        seen[f"{backend}/{path.name}"].append(path)
        if path.suffix in SOURCES and not re.fullmatch(r"[a-z0-9_]+", path.stem):
            findings.append(f"{path}:1: file names are lower_snake")
    for paths in seen.values():
        if len(paths) > 1:
            findings.append(f"{paths[1]}:1: the name is taken by {paths[0]}")
    return findings


def check_length(root: Path) -> list[str]:
    findings = []
    for path in tracked(root):
        if path.suffix in SOURCES:
            number = sum(1 for _ in lines_of(root, path))
            if number > MAX_LINES:
                findings.append(f"{path}:{number}: over {MAX_LINES} lines: not one phase or noun")
        if str(path) == "README.md":
            count = len((root / path).read_text(encoding="utf-8").split())
            if count > README_WORDS:
                findings.append(f"{path}:1: {count} words, at most {README_WORDS}")
    return findings


# Names that are gone for good, each with the field's word.
PRIVATE = {
    r"--beside|[\"']beside[\"']|\w[bB]eside[A-Z_]|\bbeside[A-Z_]|_beside\b|BESIDE": (
        "background, side data"
    ),
    r"(?:->|\.)note[sd]?\b|\bnote\(|\w+Note[ds]?\b|\bnote[A-Z]\w+|\bnoted_": (
        "record, metadata, provenance"
    ),
    r"[a-z_]meet\b|\bmeet[A-Z]\w+|\w+Meet(?:ing)?s?\b|\bmeeting_|\bhello_|_hello|\w+Hello": (
        "rendezvous, barrier round, handshake"
    ),
    r"\bfeeders?\b|\bfollowers?\b": "sender, receiver, forwarder",
    r"\bscouts?\b": "scheduler",
    r"\bclerks?\b|\bflaggers?\b": "completion warp, signal warp",
    r"\bpieces?_|_piece|\w+Piece|\bpiece[A-Z]|\w?[rR]ingUnit|\bunit(?:Of|At|Bits)\b": (
        "chunk, segment, slot"
    ),
    r"\bhear_?us\b|\bhearUs\b|\w+Heard\b": "announce",
    r"\bguest_|\bdoor_|\bboard_": "client, acceptor, shared memory",
    r"\bblame\b|\bgreet\w*|\bpatience\b|PATIENCE": "culprit, handshake, deadline",
    r"epLlTick": "epBlockTick",
}
HISTORY = {"LICENSE", "CHANGELOG.md", "check_tree.py"}  # may have any word


def private_names(root: Path) -> list[str]:
    """Names, options, keys and words that PRIVATE lists, in text written by hand."""
    gone = []
    for pattern, word in PRIVATE.items():  # most files have none of a pattern's letters
        stems = set(re.findall("[a-z]{4,}", re.sub(r"\\.|\w\?", " ", pattern).lower()))
        gone.append((re.compile(pattern), stems, word))
    findings = []
    for path in tracked(root):
        if path.suffix not in TEXT - {".svg", ".html", ""} or path.name in HISTORY:
            continue
        text = (root / path).read_bytes().decode("utf-8", errors="replace")
        lower = text.lower()
        for pattern, stems, word in gone:
            for found in pattern.finditer(text) if any(s in lower for s in stems) else ():
                number = text.count("\n", 0, found.start()) + 1
                findings.append(f"{path}:{number}: {found.group()}: the field says {word}")
    return findings


def check_words(root: Path) -> list[str]:
    """No unfinished business, no path of one machine, no private name."""
    unfinished = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    machine = re.compile(r"(?<![\w.$}~-])/(ho" + r"me|ro" + r"ot|Us" + r"ers|wo" + r"rk)/[\w.]")
    findings = []
    for path in tracked(root):
        if path.suffix not in TEXT or path.name == "LICENSE":
            continue
        for number, line in lines_of(root, path):
            if found := unfinished.search(line):
                findings.append(f"{path}:{number}: unfinished by its own word {found.group()}")
            if found := machine.search(line):
                findings.append(f"{path}:{number}: a path of one machine: {found.group()}")
    return findings + private_names(root)


def check_space(root: Path) -> list[str]:
    findings = []
    for path in tracked(root):
        if path.suffix not in TEXT or path.name == "LICENSE":
            continue
        data = (root / path).read_bytes()
        if data and not data.endswith(b"\n"):
            findings.append(f"{path}:{data.count(10) + 1}: no newline at the end of the file")
        for number, line in enumerate(data.decode("utf-8", errors="replace").split("\n"), start=1):
            if line != line.rstrip():
                findings.append(f"{path}:{number}: blanks at the end of the line")
            if "\t" in line:
                findings.append(f"{path}:{number}: a tab")
            if "\ufffd" in line or re.search("[\u200b-\u200f\u202a-\u202e\ufeff]", line):
                findings.append(f"{path}:{number}: an invisible or invalid character")
            if path.suffix in SOURCES and len(line) > MAX_COLUMNS:
                findings.append(f"{path}:{number}: {len(line)} columns, {MAX_COLUMNS} are allowed")
    return findings


def check_quiet(root: Path) -> list[str]:
    """A library never prints, aborts or exits, but for the log that NCCL_EP_DEBUG=1 asks for."""
    pattern = re.compile(r"(?<![\w.>])(printf|fprintf|puts|perror|abort|exit|assert)\s*\(")
    allowed = {("api/group.c", "fprintf")}
    findings = []
    for path in tracked(root):
        inside = str(path).startswith(LIBRARY_FOLDERS) and path.suffix in C_FAMILY
        if not inside:
            continue
        text = (root / path).read_text()
        code = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", blank, text, flags=re.DOTALL)
        for number, line in enumerate(code.split("\n"), start=1):
            found = pattern.search(line)
            if found and (str(path), found.group(1)) not in allowed:
                findings.append(f"{path}:{number}: library code calls {found.group(1)}")
    return findings


def blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def check_format(root: Path) -> list[str]:
    for name in ("clang-format", "clang-format-14"):
        if tool := shutil.which(name):
            done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
            if re.search(r"version 14\.", done.stdout):
                break
    else:
        skip("clang-format 14 is not on this machine (tools/test brings it)")
    findings = []
    files = [str(p) for p in tracked(root) if p.suffix in C_FAMILY]
    for n in range(0, len(files), 50):
        command = [tool, "--style=file", "--dry-run", *files[n : n + 50]]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        for where in re.findall(r"^(\S+?:\d+):\d+: ", done.stderr, re.MULTILINE):
            findings.append(f"{where}: run clang-format -i on it (version 14)")
    return sorted(set(findings))


def check_ruff(root: Path) -> list[str]:
    if not (tool := shutil.which("ruff")):
        skip("ruff is not on this machine (tools/test brings it)")
    files = [str(p) for p in tracked(root) if p.suffix == ".py"]
    findings = []
    for arguments in (["check", "--output-format=concise", "-q"], ["format", "--check", "-q"]):
        command = [tool, *arguments, *files]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            output = (done.stdout + done.stderr).splitlines()
            findings += output or ["python: run ruff format on it"]
    return findings


def check_shell(root: Path) -> list[str]:
    findings = []
    for path in tracked(root):
        if (root / path).stat().st_size < 200_000:
            first = next(lines_of(root, path))[1]
            if path.suffix == ".sh" or re.match(r"#!.*\b(ba)?sh\b", first):
                command = ["bash", "-n", str(root / path)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                findings += done.stderr.splitlines()
    return findings


def check_locks(root: Path) -> list[str]:
    """What pip installs is pinned with hashes, and what was asked for is what was pinned."""
    findings = []
    for asked in sorted((root / "tools").glob("requirements*.in")):
        locked = asked.with_suffix(".txt")
        text = locked.read_text() if locked.exists() else ""
        pins = re.findall(r"^([\w.-]+==\S+)((?:.*\\\n)+.*)", text, re.MULTILINE)
        lines = [line for line in text.splitlines() if re.match(r"[^\s#]", line)]
        where = locked.relative_to(root)
        findings += [
            f"{where}: {pin} has no hash" for pin, rest in pins if "--hash=sha256:" not in rest
        ]
        if not lines or len(pins) != len(lines):
            findings.append(f"{where}: {len(lines)} packages, {len(pins)} of them pinned")
        names = {pin.lower().replace("_", "-") for pin, _ in pins}
        for line in re.findall(r"^[a-z][^\s;]*", asked.read_text(), re.MULTILINE):
            if line.replace("_", "-") not in names:
                findings.append(f"{where}: {line} is not in it; run tools/lock")
    return findings


def check_links(root: Path) -> list[str]:
    """Relative links and paths in the documents lead somewhere."""
    findings = []
    for path in tracked(root):
        if path.suffix != ".md":
            continue
        for number, line in lines_of(root, path):
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", line):
                if not re.match(r"[a-z]+:", target) and not (root / path.parent / target).exists():
                    findings.append(f"{path}:{number}: the link {target} leads nowhere")
    return findings


def check_places(root: Path) -> list[str]:
    """Source files that a document names exist; `name` in `file`: the file has the name."""
    sources = {str(path): path for path in tracked(root) if path.suffix in SOURCES}
    findings = []
    for page in [p for p in tracked(root) if p.suffix == ".md"]:
        for number, line in lines_of(root, page):
            for name, file in re.findall(r"(?:`(\w+)` in )?`([\w/]+\.(?:c|h|cuh?|cc|cpp))`", line):
                found = [p for full, p in sources.items() if f"/{full}".endswith(f"/{file}")]
                if not found and file not in FOREIGN:
                    findings.append(f"{page}:{number}: there is no {file}")
                elif (
                    found
                    and name
                    and not any(re.search(rf"\b{name}\b", (root / p).read_text()) for p in found)
                ):
                    findings.append(f"{page}:{number}: {file} has no {name}")
    return findings


def exported(library: str) -> set[str]:
    command = ["nm", "-D", "--defined-only", library]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}


def declared(root: Path, headers: list[str], marker: str) -> set[str]:
    """Functions that the headers declare after `marker`, or whose name fits marker*."""
    names: set[str] = set()
    for header in headers:
        text = (root / header).read_text()
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
        text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
        if marker.endswith("*"):
            names |= set(re.findall(rf"\b({marker[:-1]}\w+)\s*\(", text))
        else:
            names |= set(re.findall(marker + r"[^;{}()]*?\b(\w+)\s*\(", text))
    return names


def check_exports(root: Path, library: str, *rest: str) -> list[str]:
    """exports LIBRARY list FILE | exports LIBRARY headers MARKER HEADER..."""
    kind, first, headers = rest[0], rest[1], list(rest[2:])
    if kind == "list":
        wanted = set((root / first).read_text().split())
    else:
        wanted = declared(root, headers, first)
    present = exported(library) - {"_init", "_fini", "_edata", "_end", "__bss_start"}
    name = Path(library).name
    return [f"{name}: {s} is declared but not exported" for s in sorted(wanted - present)] + [
        f"{name}: {s} is exported but not declared" for s in sorted(present - wanted)
    ]


def host_api_rows(page: Path) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The rows of docs/host_api.md: name to (works, sentence or absent; suffix), and findings."""
    rows: dict[str, tuple[str, str]] = {}
    findings = []
    for number, line in enumerate(page.read_text().split("\n"), start=1):
        if not re.match(r"\| (cuda|nccl)", line):
            continue
        name, state, also, why = (cell.strip() for cell in line.strip("|").split("|"))
        where = f"docs/{page.name}:{number}"
        if state not in ("works", "sentence", "absent"):
            findings.append(f"{where}: {name} is {state}")
        if (state == "works") == bool(why):
            findings.append(f"{where}: {name}: a reason is for what does not work")
        if name in rows:
            findings.append(f"{where}: {name} is there twice")
        rows[name] = (state, also)
    return rows, findings


def header_names(folder: Path) -> set[str]:
    """Functions that the real headers of a folder declare, with their per-thread names."""
    names: set[str] = set()
    for header in ("cuda_runtime_api.h", "cuda_profiler_api.h", "nccl.h", "nccl_device/host.h"):
        path = folder / header
        if not path.is_file():
            continue
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for kind, name in re.findall(r"__CUDART_API_(PTDS|PTSZ)\((cuda\w+)\)", text):
            names.add(f"{name}_{kind.lower()}")
        code = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
        names |= set(re.findall(r"CUDARTAPI(?:_CDECL)?\s+(cuda\w+)\s*\(", code))
        names |= set(
            re.findall(r"(?:ncclResult_t|ncclTeam_t|int|void|char\s*\*)\s+(p?nccl\w+)\(", code)
        )
    return names


def check_host_api(root: Path, library: str, others: str, *folders: str) -> list[str]:
    """host_api LIBRARY LIST FOLDER...: docs/host_api.md against the library (which exports besides
    what LIST has), against host/include, and against the real headers in the folders."""
    rows, findings = host_api_rows(root / "docs/host_api.md")
    known, exported_names = set(), set((root / others).read_text().split())
    for name, (state, also) in rows.items():
        suffixed = {"p": f"p{name}", "zero": name}.get(also, name + also)
        names = {name, suffixed}
        known |= names
        exported_names |= names if state != "absent" else set()
    headers = sorted((root / "host/include").rglob("*.h"))
    ours = declared(root, [str(h) for h in headers], "(?:cuda|nccl)[A-Z]*")
    present = exported(library) - {"_init", "_fini", "_edata", "_end", "__bss_start"}
    lib = Path(library).name
    findings += [f"{lib}: {s} is listed but not exported" for s in exported_names - present]
    findings += [f"{lib}: {s} is exported but not listed" for s in present - exported_names]
    findings += [f"host/include: {s} is declared but not exported" for s in ours - present]
    for folder in {Path(f).resolve() for f in folders if Path(f).is_dir()}:
        names = header_names(folder)
        print(f"{folder}: {len(names)} names")
        findings += [f"{folder}: {s} is not in docs/host_api.md" for s in names - known]
    return sorted(findings)


def skip(reason: str) -> None:
    print(f"skipped: {reason}")
    sys.exit(77)


def main() -> int:
    root = Path(sys.argv[1]).resolve()
    check = globals().get(f"check_{sys.argv[2]}")
    if check is None:
        print(f"there is no check named {sys.argv[2]}", file=sys.stderr)
        return 2
    findings = check(root, *sys.argv[3:])
    print("\n".join(findings[:200]) or f"{sys.argv[2]}: nothing found")
    if len(findings) > 200:
        print(f"and {len(findings) - 200} more")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
