"""Splits: all that is fixed about a fit before it runs (validate/data/public/split.schema.json)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trefoil.fit.cases import Case
from trefoil.fit.model import OBSERVABLES, Setting
from trefoil.fit.search import Range
from trefoil.inputs import read_json
from trefoil.places import measurements
from trefoil.simulator import Costs

ROW_COLUMNS = (
    *("nodes", "ranks", "hidden", "experts", "topk", "sms", "tokens"),
    *("routing", "ragged", "empty_ranks", "seed", "late_us", "background"),
)


class SplitError(ValueError):
    """A split that cannot be used; the text is one sentence."""


@dataclass(frozen=True)
class Split:
    """A split file, checked."""

    path: Path
    text: dict[str, Any]

    @property
    def table(self) -> Path:
        return self.path.parent / str(self.text["table"])

    @property
    def setting(self) -> Setting:
        t = self.text
        return Setting(
            t["mode"],
            t["variant"],
            t["cluster"],
            t.get("gpus_per_node", 8),
            t.get("dispatch_row", "fp8-128"),
            t.get("combine_row", "bf16"),
            t.get("combine_partial", False),
            t.get("observable", OBSERVABLES[0]),
        )

    def with_masks(self, cases: Sequence[Case]) -> list[Case]:
        """The table's cases with the selections that were -1."""
        counts = self.text.get("masked_selections", {}).get("from_tokens", {})

        def masked(tokens: int) -> int:
            known = [int(least) for least in counts if int(least) <= tokens]
            return counts[str(max(known))] if known else 0

        return [replace(case, masked_selections=masked(case.tokens)) for case in cases]

    @property
    def ranges(self) -> dict[str, Range]:
        return {
            name: Range(p["start"], p["low"], p["high"]) for name, p in self.text["fitted"].items()
        }

    def given(self) -> Costs:
        return Costs({name: p["value"] for name, p in self.text["given"].items()})

    def is_left_out(self, case: Case) -> bool:
        """Neither fitted nor scored: the split says why."""
        return any(_is_in(rows, case) for rows in self.text.get("leave_out", ()))

    def choose(self, part: str, cases: Sequence[Case]) -> list[Case]:
        rows = self.text[part]
        cases = [case for case in cases if not self.is_left_out(case)]
        if part == "score" and (rows == "rest" or rows.get("rest")):
            cases = [case for case in cases if not _is_in(self.text["fit"], case)]
        return [case for case in cases if rows == "rest" or _is_in(rows, case)]


def _is_in(rows: dict[str, Any], case: Case) -> bool:
    least, most = rows.get("tokens_from_to", (0, 1 << 62))
    listed = (c for c in ROW_COLUMNS if c in rows)
    return least <= case.tokens <= most and all(getattr(case, c) in rows[c] for c in listed)


def split_files() -> dict[str, Path]:
    """Committed splits by name: of the source tree, or of the installation."""
    folders = [home / part for home in measurements() for part in ("public", "")]
    found = (path for folder in folders for path in sorted(folder.glob("*.split.json")))
    return {path.name.removesuffix(".split.json"): path for path in found}


def split_of_table(table: Path) -> Split | None:
    """The first committed one of this very table."""
    for name in split_files():
        split = load_split(name)
        if split.table.resolve() == table.resolve():
            return split
    return None


def load_split(name_or_path: str) -> Split:
    """By the name of a committed split, or by path."""
    is_path = "/" in name_or_path or name_or_path.endswith(".json")
    known = split_files()
    if not is_path and name_or_path not in known:
        names = ", ".join(sorted(known))
        raise SplitError(f"no split is called {name_or_path}; known are {names}, or a path")
    path = Path(name_or_path) if is_path else known[name_or_path]
    text = read_json(path, SplitError)
    _check_split(path, text)
    return Split(path, text)


def _check_masked(path: Path, text: dict[str, Any]) -> None:
    if "masked_selections" not in text:
        return
    of = text["masked_selections"]
    where = f"{path}: masked_selections"
    if not isinstance(of, dict) or set(of) != {"from_tokens", "source"}:
        raise SplitError(f"{where} must have from_tokens and source")
    for tokens, count in of["from_tokens"].items():
        if not tokens.isdecimal() or not isinstance(count, int) or count < 0:
            raise SplitError(f"{where}: {tokens!r}: {count!r} must be a count from so many tokens")


def _check_split(path: Path, text: Any) -> None:
    if not isinstance(text, dict):
        raise SplitError(f"{path}: must be a JSON object")
    for key in ("name", "table", "mode", "variant", "cluster", "fit", "score", "given", "fitted"):
        if key not in text:
            raise SplitError(f"{path}: {key} is missing")
    if text["mode"] not in ("ll", "ht"):
        raise SplitError(f'{path}: mode must be "ll" or "ht"')
    if text["variant"] not in ("ours", "per-expert"):
        raise SplitError(f'{path}: variant must be "ours" or "per-expert"')
    if text.get("observable", OBSERVABLES[0]) not in OBSERVABLES:
        raise SplitError(f"{path}: observable must be one of {', '.join(OBSERVABLES)}")
    _check_masked(path, text)
    chosen = [(part, text[part]) for part in ("fit", "score")]
    chosen += [("leave_out", rows) for rows in text.get("leave_out", ())]
    for part, rows in chosen:
        if part == "score" and rows == "rest":
            continue
        more = {"score": {"rest"}, "leave_out": {"why"}}.get(part, set())
        unknown = set(rows) - {*ROW_COLUMNS, "tokens_from_to", *more}
        if unknown:
            raise SplitError(f"{path}: {part} names {sorted(unknown)[0]}, which is no column")
        if part == "leave_out" and not rows.get("why"):
            raise SplitError(f"{path}: leave_out does not say why")
    for part, key in (("given", "value"), ("fitted", "start")):
        for name, entry in text[part].items():
            if name not in Costs.names():
                raise SplitError(f"{path}: {name} in {part} is not a cost")
            missing = {key, "low", "high", "source"} - set(entry)
            if missing:
                raise SplitError(f"{path}: {name} in {part} has no {sorted(missing)[0]}")
            if not entry["low"] <= entry[key] <= entry["high"]:
                raise SplitError(f"{path}: {name} in {part} lies outside its own bounds")
            if part == "fitted" and entry["low"] == entry["high"]:
                raise SplitError(f"{path}: {name} is to be fitted between equal bounds")
