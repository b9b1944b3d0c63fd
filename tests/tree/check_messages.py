"""Every message of the libraries and of the command is explained in docs/troubleshooting.md.

    python3 check_messages.py ROOT [--list | --write]

A message is the format of a call that fails, refuses, reports or logs (CALLS below, and what
Python raises). docs/troubleshooting.in has the page's text and what each message means: every
`code` in the first column of a table there is a pattern, where … stands for any text, as the
conversions of a format do. --write puts the messages that fit in the place of the patterns, and so
makes the page; each stands once, in the row whose pattern has most letters of its own.

A message without a row, a pattern that no message fits, and a page that --write would change are
findings. A pattern needs at least five letters of its own, so that none matches everything.
Messages without words of their own ("%s: %s", "rank %d, %s: %s", "ncclEpX: %s") pass other
sentences on. --list prints the messages that no pattern matches.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = "docs/troubleshooting.md"
SOURCE = "docs/troubleshooting.in"
C_FOLDERS = ("api", "cli", "host", "kernels", "models", "net", "plan", "ref", "sim", "validate")
# Which argument holds the format.
CALLS = {
    "EP_CHECK": 2,
    "EP_CUDA_CHECK": 2,
    "EP_NCCL_CHECK": 2,
    "epFail": 1,
    "epCudaFail": 1,
    "epNcclFail": 1,
    "epNetFail": 1,
    "epSetSentence": 0,
    "epReport": 3,
    "epLog": 1,
    "epRealFail": 1,
    "refuse": 4,
    "cliFail": 1,
    "cliUsage": 1,
    "snprintf": 2,  # where it writes into a SENTENCE
    "fprintf": 1,  # to stderr
    "add": 4,  # the doctor's advice
    "addRuntime": 4,
}
SENTENCE = re.compile(r"\b(why|sentence|culprit|reason|what|how|text|advice|stderr)\b")
STRING = r'"(?:\\.|[^"\\\n])*"'
ANY = "…"


def arguments(text: str, start: int) -> list[str]:
    """The arguments of the call whose opening parenthesis ends at `start`."""
    found, depth, begin = [], 1, start
    for token in re.finditer(rf"{STRING}|'(?:\\.|[^'\\])+'|[(){{}}\[\],]", text[start:]):
        mark, at = token.group(), start + token.start()
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        if depth == 0 or (mark == "," and depth == 1):
            found.append(text[begin:at])
            begin = at + 1
        if depth == 0:
            break
    return found


def formats(argument: str) -> Iterator[str]:
    """The string literals of an argument, adjacent ones joined; several if it is a choice."""
    for part in re.findall(rf"(?:(?:{STRING}|\bPRI\w+)\s*)+", argument):
        text = "".join(s[1:-1] if s[0] == '"' else "d" for s in re.findall(rf"{STRING}|\w+", part))
        yield normal(text.replace('\\"', '"').replace("\\n", " "))


def normal(text: str) -> str:
    """The format with … for each conversion, as the page writes it."""
    conversion = r"%[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|z|j)?[diouxXeEfgGcsp]"
    text = re.sub(conversion, ANY, text).replace("%%", "%")
    return re.sub(rf"{ANY}+", ANY, " ".join(text.split()))


def c_messages(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    text = text.replace("\\\n", " \n")
    for call in re.finditer(rf"\b({'|'.join(CALLS)})\s*\(", text):
        given = arguments(text, call.end())
        line = text.count("\n", 0, call.start()) + 1
        place = CALLS[call.group(1)]
        for message in formats(given[place]) if place < len(given) else ():
            if call.group(1) == "add" and path.name != "cmd_doctor.c":
                continue
            told = SENTENCE.search(given[0]) and len(re.findall(r"\b[a-z]+\b", message)) > 2
            if call.group(1) not in ("snprintf", "fprintf") or told:
                yield line, message


def python_text(node: ast.expr) -> str:
    """A string as the page writes it: … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(python_text(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return python_text(node.left) + python_text(node.right)
    return ANY


def python_messages(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if isinstance(node, ast.Raise) or name in ("error", "exit"):
            yield call.lineno, re.sub(rf"{ANY}+", ANY, " ".join(python_text(call.args[0]).split()))


def messages(root: Path) -> Iterator[tuple[str, str]]:
    for folder in C_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".c", ".h", ".cu", ".cuh"):
                for line, message in c_messages(path):
                    yield f"{path.relative_to(root)}:{line}", message
    for path in sorted((root / "python/trefoil").rglob("*.py")):
        for line, message in python_messages(path):
            yield f"{path.relative_to(root)}:{line}", message


def passes_on(message: str) -> bool:
    return letters(message) < 5 or bool(re.fullmatch(rf"\w+( {ANY})?: {ANY}", message))


def letters(text: str) -> int:
    return sum(c.isalpha() for c in text)


def first_column(line: str) -> str | None:
    """The first cell of a row of messages."""
    if not line.startswith("| `") or line.startswith("| `trefoil VERB`"):
        return None
    return re.split(r"(?<!\\)\|", line)[1]


def patterns_of(text: str) -> list[tuple[int, str]]:
    """The line and the text of each pattern."""
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        cell = (first_column(line) or "").replace("\\|", "|")
        found += [(number, " ".join(code.split())) for code in re.findall(r"`([^`]+)`", cell)]
    return found


def as_regex(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in pattern.split(ANY)))


def page_of(source: str, rows: dict[int, set[str]]) -> str:
    """The source with the messages of each row, by line, in the place of its patterns."""
    lines = source.split("\n")
    for number, messages_of_row in rows.items():
        line = lines[number - 1]
        cell = first_column(line) or ""
        codes = []
        for message in sorted(messages_of_row, key=lambda m: (m.strip(f"{ANY}: ").lower(), m)):
            mark = "``" if "`" in message else "`"
            codes.append(f"{mark}{message}{mark}".replace("|", "\\|"))
        lines[number - 1] = f"| {'<br>'.join(codes)} |{line[len(cell) + 2 :]}"
    note = f"<!-- made from {SOURCE} by: python3 tests/tree/check_messages.py . --write -->"
    return "\n".join([lines[0], "", note, *lines[1:]])


def main() -> int:
    root = Path(sys.argv[1]).resolve()
    said = [(where, m) for where, m in messages(root) if not passes_on(m)]
    source = (root / SOURCE).read_text(encoding="utf-8")
    patterns = patterns_of(source)
    regexes = [as_regex(pattern) for _, pattern in patterns]
    used = [False] * len(patterns)
    missing = []
    rows: dict[int, set[str]] = {number: set() for number, _ in patterns}
    for where, message in said:
        fits = [i for i, regex in enumerate(regexes) if regex.fullmatch(message)]
        for i in fits:
            used[i] = True
        if fits:
            best = max(fits, key=lambda i: letters(patterns[i][1]))
            rows[patterns[best][0]].add(message)
        else:
            missing.append(f"{where}: {message}")
    if "--list" in sys.argv[2:]:
        print("\n".join(missing))
        return 0
    findings = [f"{m}: {SOURCE} does not explain it" for m in missing]
    for (number, pattern), was_used in zip(patterns, used, strict=True):
        if letters(pattern) < 5:
            findings.append(f"{SOURCE}:{number}: `{pattern}` has too few letters of its own")
        elif not was_used:
            findings.append(f"{SOURCE}:{number}: no message is like `{pattern}`")
    for number in [n for n, found in rows.items() if not found]:
        findings.append(f"{SOURCE}:{number}: every message of this row fits another row better")
    page, made = root / PAGE, page_of(source, {n: found for n, found in rows.items() if found})
    if "--write" in sys.argv[2:]:
        page.write_text(made, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != made:
        findings.append(f"{PAGE}:1: is stale: run python3 tests/tree/check_messages.py . --write")
    print("\n".join(findings) or f"{len(said)} messages, all explained by {len(patterns)} patterns")
    return 1 if findings or not said else 0


if __name__ == "__main__":
    sys.exit(main())
