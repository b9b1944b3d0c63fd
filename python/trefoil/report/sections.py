"""What the report says of measured times: speed, circumstances, models beside them, scaling.

Each function returns what the template takes: texts, table rows and pictures. Where nothing has
been measured, `missing` says so with the command that measures it; no figure is made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trefoil.export.predicted import Predicted, Predictions, prediction_files, read_predictions
from trefoil.report import measured_plots as plots
from trefoil.report.figures import Figure, of_one_kind
from trefoil.report.fitted import FittedTimes
from trefoil.report.goals import HT_TOKENS, LL_TOKENS, RANKS, Answer, answers, of_goal_shape
from trefoil.report.validated import TimedPoint, ValidatedTimes

Own = Callable[[str], str]
MEASURE = "tools/measure --minutes 9"
LL_SHOWN = (8, 128)  # tokens in the picture of scaling


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _sources(figures: Iterable[Figure]) -> list[str]:
    """ "ll_kernels_h200x4.json: 30 figures, NVIDIA H200, kernels by themselves"."""
    how = {
        "kernel": "kernels by themselves, below the API",
        "through the API": "kernel times through the API, earlier kernels than those below it",
        "campaign": "kernel times through the API, a campaign of tools/measure",
    }
    found: dict[str, list[Figure]] = {}
    for figure in figures:
        found.setdefault(figure.source, []).append(figure)
    return [
        f"{source}: {len(of)} figures, {of[0].gpu or 'a machine not named'}, {how[of[0].how]}"
        for source, of in found.items()
    ]


# ---- Speed --------------------------------------------------------------------------------------


def _goal_cell(a: Answer) -> dict[str, str]:
    """Figure, goal and the plain copy, as a cell or a row shows them."""
    f = a.figure
    if f is None:
        return {"measured": "not measured", "spread": "", "bound": "", "mark": "–", "good": ""}
    bound = ""
    if f.bound_us and a.mode == "ll":
        bound = f"{f.us / (f.bound_us + plots.BASE_US):.2f} ×"
    elif f.bound_us:
        bound = f"{100 * f.bound_us / f.us:.0f} %"
    mark, good = ("✓ reached", "good") if a.reached else ("✗ missed", "bad")
    return {
        "measured": _exact_us(f.us, a.goal_us),
        "spread": f"{_us(f.low_us)} – {_us(f.high_us)}",
        "bound": bound,
        "mark": mark,
        "good": good,
        "sms": f"{f.sms}" if f.sms else "",
    }


def _exact_us(us: float, goal: float) -> str:
    """With as many digits as tell it from its goal."""
    if us >= 99.95:
        return f"{us:.0f}"
    return f"{us:.3f}" if 0 < us - goal < 0.01 else f"{us:.2f}"


def _ll_rows(asked: Sequence[Answer]) -> list[dict[str, Any]]:
    """A row an operation, a cell a number of tokens."""
    found: dict[str, list[dict[str, str]]] = {}
    for a in asked:
        if a.mode == "ll":
            found.setdefault(a.name, []).append({**_goal_cell(a), "goal": f"{a.goal_us:g}"})
    return [{"name": name, "cells": cells} for name, cells in found.items()]


def _ht_rows(asked: Sequence[Answer]) -> list[dict[str, str]]:
    return [
        {
            "sms": "",
            **_goal_cell(a),
            "name": a.name,
            "tokens": f"{a.tokens:,}",
            "goal": f"{a.goal_us:g}",
            "most": f"{a.max_sms}" if a.max_sms else "any",
        }
        for a in asked
        if a.mode == "ht"
    ]


def _best_by(figures: Iterable[Figure], key: str) -> list[Figure]:
    """The fastest of each number of tokens or SMs, ascending."""
    found: dict[int, Figure] = {}
    for f in figures:
        at = getattr(f, key)
        if at not in found or f.us < found[at].us:
            found[at] = f
    return [found[at] for at in sorted(found)]


def _shown_ranks(figures: Iterable[Figure]) -> list[int]:
    """The goals' number of GPUs, and the largest if that is another."""
    most = max((f.ranks for f in figures if of_goal_shape(f)), default=RANKS)
    return list(dict.fromkeys((RANKS, most)))


def _curves(plain: Sequence[Figure], goals: Sequence[Answer]) -> Iterator[str]:
    """Each operation of low latency over tokens."""
    of_mode = [f for f in plain if f.mode == "ll"]
    for name in dict.fromkeys(f.name for f in of_mode):
        of = _best_by(of_one_kind((f for f in of_mode if f.name == name), "tokens"), "tokens")
        if len(of) > 1:
            how = ", earlier kernels through the API" if of[0].how == "through the API" else ""
            title = f"LL {name}, {of[0].ranks} GPUs{how}"
            own_goals = [a for a in goals if a.mode == "ll" and a.name == name]
            yield plots.latency_curve(title, of, own_goals)


def _sweeps(plain: Sequence[Figure], goals: Sequence[Answer]) -> Iterator[str]:
    """Each operation of high throughput over SMs."""
    of_mode = [f for f in plain if f.mode == "ht" and f.op != "update" and f.sms]
    of_mode = [f for f in of_mode if f.tokens == HT_TOKENS]
    for name in dict.fromkeys(f.name for f in of_mode):
        of = _best_by(of_one_kind((f for f in of_mode if f.name == name), "sms"), "sms")
        if len(of) > 1:
            own_goals = [a for a in goals if a.mode == "ht" and a.name == name and a.max_sms]
            yield plots.sm_sweep(f"HT {name}, {of[0].ranks} GPUs", of, own_goals)


def speed(figures: Sequence[Figure], own: Own) -> dict[str, Any]:
    """Goals, latency curves of LL, SM sweep of HT."""
    asked = answers(figures)
    curves, sweeps = [], []
    for ranks in _shown_ranks(figures):
        plain = [f for f in figures if of_goal_shape(f) and f.seed == 1 and f.ranks == ranks]
        goals = asked if ranks == RANKS else []
        curves += [own(svg) for svg in _curves(plain, goals)]
        sweeps += [own(svg) for svg in _sweeps(plain, goals)]
    done = [a for a in asked if a.reached is not None]
    reached = sum(bool(a.reached) for a in done)
    return {
        "facts": [(f"{reached} of {len(done)}", "goals on 4 GPUs reached")] if done else [],
        "tokens": LL_TOKENS,
        "ll": _ll_rows(asked),
        "ht": _ht_rows(asked),
        "verdict": f"{reached} of {len(done)} goals on 4 GPUs that were measured are reached, "
        f"{len(asked) - len(done)} were not measured."
        if done
        else f"None of {len(asked)} goals has been measured.",
        "curves": curves,
        "sweeps": sweeps,
        "sources": _sources(figures),
        "missing": [] if figures else [("the speed of the kernels", MEASURE)],
    }


# ---- Circumstances ------------------------------------------------------------------------------


def _how(f: Figure) -> str:
    words = []
    if f.routing != "uniform":
        words.append(f"{f.routing} {f.skew:g}")
    if f.ragged:
        words.append(f"ragged {f.ragged:g}")
    if f.empty_ranks:
        words.append(f"{f.empty_ranks} empty rank{'s'[: f.empty_ranks > 1]}")
    if f.start_skew_us:
        words.append(f"last rank {f.start_skew_us:g} µs late")
    if f.background != "nothing":
        kept = f", kept {100 * f.background_share:.0f} %" if f.background_share else ""
        words.append(f"background {f.background}" + (f" on {f.sms} SMs" if f.sms else "") + kept)
    return ", ".join(words)


def _bar(f: Figure) -> str:
    """What happened, to which operation, with how many SMs (high throughput)."""
    variant = "" if f.variant == "plain" else f" {f.variant}"
    sms = f" [{f.sms}]" if f.mode == "ht" and f.sms and f.background == "nothing" else ""
    return f"{_how(f)}: {f.op}{variant}{sms}"


KINDS: tuple[tuple[str, str, Callable[[Figure], bool]], ...] = (
    (
        "Skewed routing",
        "skewed routing",
        lambda f: f.routing != "uniform" or f.ragged > 0 or f.empty_ranks > 0,
    ),
    ("A late rank", "start skew", lambda f: f.start_skew_us > 0),
    ("Background work", "start skew", lambda f: f.background != "nothing"),
)


def _undisturbed(f: Figure, plain: Sequence[Figure]) -> Figure | None:
    """The same shape and SMs, balanced and by itself."""
    same = ("op", "mode", "layout", "variant", "ranks", "tokens", "hidden", "topk", "sms")
    found = (p for p in plain if all(getattr(p, name) == getattr(f, name) for name in same))
    return min(found, key=lambda p: p.seed, default=None)


def circumstances(figures: Sequence[Figure], own: Own) -> dict[str, Any]:
    """Skew, start skew and background work, each relative to the same shape without it."""
    plain = [f for f in figures if f.is_plain]
    pictures, missing = [], []
    for title, stage, belongs in KINDS:
        pairs = [(f, _undisturbed(f, plain)) for f in figures if belongs(f)]
        known = [(f, p) for f, p in pairs if p is not None]
        if not known:
            missing.append((title[0].lower() + title[1:], f"tools/measure --stages '{stage}'"))
        most = max((f.ranks for f, _ in known), default=0)
        groups: dict[tuple[str, ...], list[tuple[Figure, Figure]]] = {}
        for f, p in known:
            if f.ranks == most:
                name = (f.mode.upper(), f.layout, f"{f.tokens:,} tokens")
                groups.setdefault(name, []).append((f, p))
        for name, pairs in groups.items():
            # Of several seeds the first.
            once = {_bar(f): (f, p) for f, p in sorted(pairs, key=lambda x: -x[0].seed)}
            pairs = [once[label] for label in sorted(once)]
            labels = [_bar(f) for f, _ in pairs]
            loads = [
                f.port_bytes / p.port_bytes if p.port_bytes and stage == "skewed routing" else 0.0
                for f, p in pairs
            ]
            times = [f.us / p.us for f, p in pairs]
            named = f"{title}, {' '.join(name)}, {most} GPUs"
            pictures.append(own(plots.ratios(named, labels, times, loads)))
    shapes = sorted({(f.hidden, f.topk) for f in plain} - {(7168, 8)})
    if not shapes:
        missing.append(("other hidden sizes and top-k", "tools/measure --stages 'hidden sizes'"))
    return {"svgs": pictures, "missing": missing}


# ---- Models beside measurements ------------------------------------------------------------------


def scatters(
    sets: Sequence[ValidatedTimes], fits: Sequence[FittedTimes], own: Own
) -> dict[str, Any]:
    """Predicted against measured; the errors of fits that were made of new measurements."""
    shown = [(t.name, t.points) for t in sets if t.points]
    shown += [(f.name, f.points) for f in fits if f.points]
    return {
        "svgs": [own(plots.scatter(name, points)) for name, points in shown],
        "fits": fits,
        "missing": []
        if shown
        else [("predictions beside measurements", "trefoil validate --json > v.json")],
    }


def _part_label(p: TimedPoint) -> str:
    sms = f", {p.sms} SMs" if p.sms else ""
    return f"{p.op}, {p.tokens:,} tok.{sms}: {_us(p.measured_us)} µs"


def _chosen(t: ValidatedTimes) -> list[TimedPoint]:
    """Few rows that show the range: all of a small set, else one shape at the most nodes."""
    points = t.points
    if len(points) > 12:
        nodes = max(p.nodes for p in points)
        hidden = max(p.hidden for p in points)
        points = [p for p in points if (p.nodes, p.hidden) == (nodes, hidden)]
        topk = max((p.topk for p in points), key=[p.topk for p in points].count)
        sms = {max((p.sms for p in points if p.op == op), default=0) for op in OPS}
        points = [p for p in points if p.topk == topk and p.sms in sms]
        tokens = sorted({p.tokens for p in points})
        some = {tokens[0], tokens[len(tokens) // 2], tokens[-1]} if tokens else set()
        points = [p for p in points if p.tokens in some]
    order = sorted(points, key=lambda p: (OPS.index(p.op), p.tokens, p.sms))
    once: dict[tuple[object, ...], TimedPoint] = {}
    for p in order:
        once.setdefault((p.op, p.tokens, p.sms), p)
    return list(once.values())


OPS = ("dispatch", "combine")


def where_time_goes(sets: Sequence[ValidatedTimes], own: Own) -> list[str]:
    pictures = []
    for t in sets:
        if t.points and t.part == "held out":
            rows = _chosen(t)
            title = f"{t.name}, {max(p.ranks for p in rows)} GPUs"
            pictures.append(own(plots.parts(title, rows, [_part_label(p) for p in rows])))
    return pictures


# ---- Scaling ------------------------------------------------------------------------------------


def newest_tables(paths: Sequence[Path] | None = None) -> list[Predictions]:
    """Of each set the newest committed table."""
    found: dict[str, Predictions] = {}
    for path in paths if paths is not None else prediction_files():
        table = read_predictions(path)
        name = path.stem.removeprefix(table.about.get("date", "")).lstrip("-")
        found.setdefault(name, table)
    return [found[name] for name in sorted(found, reverse=True)]


def _measured_at(figures: Iterable[Figure], row: Predicted) -> list[Figure]:
    """What was measured of that operation, on any number of GPUs: with the table's SMs in HT."""
    layout = "expert-major" if row.mode == "ll" else "flat"
    what = (row.mode, row.op, layout, "plain", row.tokens)
    found: dict[int, Figure] = {}
    for f in figures:
        same = (f.mode, f.op, f.layout, f.variant, f.tokens) == what and of_goal_shape(f)
        if same and f.seed == 1 and (f.mode == "ll" or f.sms == row.sms):
            found[f.ranks] = f
    return [found[ranks] for ranks in sorted(found) if ranks > 1]


def _lines(rows: Sequence[Predicted], more: str, figures: Iterable[Figure]) -> list[plots.Line]:
    tokens = LL_SHOWN if rows[0].mode == "ll" else (HT_TOKENS,)
    lines = []
    for count in tokens:
        for op in OPS:
            own = sorted((r for r in rows if (r.op, r.tokens) == (op, count)), key=lambda r: r.gpus)
            if own:
                measured = _measured_at(figures, own[0]) if own[0].kernels == "trefoil" else []
                lines.append(plots.Line(f"{op}, {count:,} tokens{more}", own, measured))
    return lines


def _groups(tables: Sequence[Predictions]) -> dict[tuple[str, str], list[Predictions]]:
    """Tables of the same kernels and mode share a picture, whatever costs they were made with."""
    found: dict[tuple[str, str], list[Predictions]] = {}
    for table in tables:
        found.setdefault((table.rows[0].kernels, table.rows[0].mode), []).append(table)
    return found


def scaling(tables: Sequence[Predictions], figures: Sequence[Figure], own: Own) -> dict[str, Any]:
    """Dated predictions to 1024 GPUs: a picture for kernels and mode, what was measured beside."""
    pictures, rows = [], []
    for (kernels, mode), group in _groups(tables).items():
        whose = "ours" if kernels == "trefoil" else kernels
        lines: list[plots.Line] = []
        for table in group:
            way = ", rails" if table.rows[0].variant == "rails" else ""
            more = f" ({table.rows[0].record}{way})" if len(group) > 1 else ""
            lines += _lines(table.rows, more, figures)
        costs = "" if len(group) > 1 else f", costs {group[0].rows[0].record}"
        pictures.append(own(plots.scaling(f"{mode.upper()}, {whose}{costs}", lines)))
        rows += [
            {
                "set": f"{mode.upper()} {whose}",
                "what": line.label,
                "gpus": f"{r.gpus:,}",
                "us": _us(r.us),
                "interval": f"{_us(r.low_us)} – {_us(r.high_us)}",
                "rows": f"{r.rows_behind}",
                "beyond": "yes" if r.extrapolated else "no",
                "bound": _us(r.bound_us),
            }
            for line in lines
            for r in line.rows
        ]
    return {
        "svgs": pictures,
        "rows": rows,
        "dates": ", ".join(sorted({t.about["date"] for t in tables})),
        "missing": []
        if tables
        else [("predictions", "trefoil export predictions -o validate/data/predictions")],
    }
