"""The report: the files' numbers are on the page, it needs nothing else, bad files fail."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import sample_capacity
import sample_results
from texts import overlapping
from trefoil.capacity import plan_plots
from trefoil.report import __main__ as report
from trefoil.report.results import ResultError, load_check, load_plan
from trefoil.units import format_bytes, format_seconds


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def page(tmp_path: Path, check: dict, *plans: dict) -> str:
    files = [write(tmp_path / f"p{n}.json", plan) for n, plan in enumerate(plans)]
    output = tmp_path / "sub" / "report.html"
    arguments = ["--check", str(write(tmp_path / "c.json", check)), "-o", str(output)]
    if files:
        arguments += ["--plan", *map(str, files)]
    assert report.main(arguments) == 0
    return output.read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Collects attributes and checks that tags nest."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


CHECK = sample_results.check(4096, sample_results.MODES)
PLANS = [sample_results.plan("ll", 128), sample_results.plan("ht", 4096)]


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(tmp_path_factory.mktemp("page"), CHECK, *PLANS)


def test_page_holds_every_run_and_prediction(full_page: str) -> None:
    check, plans, text = CHECK, PLANS, full_page
    assert "All 4 runs agree" in text
    for run in check["runs"]:
        assert f"<td>{run['mode']}</td>" in text
        assert format_bytes(run["bytes_compared"]) in text
    for plan in plans:
        for point in plan["points"]:
            assert format_seconds(point["dispatch"]["seconds"]) in text
    assert text.count("<svg ") == 4 * 2 + 2 + 2
    # A prediction is a bound under assumptions, which stand beside it.
    last = format_seconds(plans[0]["points"][-1]["dispatch"]["seconds"])
    assert f"≥ {last}" in text
    assert "EP 256, uniform routing" in text
    assert "limits a token to few nodes" in text
    assert "NVLink port 350 GB/s, NIC port 45 GB/s, network latency 8.40 µs" in text


def test_page_needs_nothing_else_and_nests(full_page: str) -> None:
    text = full_page
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    ids = [value for _, name, value in tags.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for tag, name, value in tags.attributes:
        assert tag != "script"
        if name in ("src", "href", "xlink:href"):
            assert value and value[0] == "#" and value[1:] in ids, (tag, name, value)
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_difference_is_shown_first(tmp_path: Path) -> None:
    check = sample_results.check(128, sample_results.MODES[:2])
    check["runs"][1] |= {"ok": False, "difference": "rank 3, slot 17: expected <rank 2, token 5>"}
    for name in ("update_s", "dispatch_s", "combine_s", "reference_s"):
        del check["runs"][1][name]  # what is wrong has no times
    text = page(tmp_path, check)
    assert "1 of 2 runs differ" in text
    assert "All 2" not in text
    assert "rank 3, slot 17: expected &lt;rank 2, token 5&gt;" in text


def test_random_cases_alone(tmp_path: Path) -> None:
    text = page(tmp_path, {"cases": 5000, "failed": 0, "seconds": 2.0, "seed": "7"})
    assert "All 5,000 random cases agree." in text
    assert ">2,500<" in text
    cases = {"cases": 5000, "failed": 3, "seconds": 2.0, "seed": 7, "failure": "slot <17> at fault"}
    failed = page(tmp_path, cases)
    assert "3 of 5,000 random cases differ." in failed
    assert "slot &lt;17&gt; at fault" in failed


def test_two_nodes_and_one_rank_and_no_bytes(tmp_path: Path) -> None:
    many = sample_results.run("ht-flat", ranks=8, ranks_per_node=4)
    one = sample_results.run("ll-rank-major", ranks=1, ranks_per_node=1)
    nothing = copy.deepcopy(one)
    nothing["dispatch_bytes"] = nothing["combine_bytes"] = [[0]]
    nothing |= {"update_s": 0, "dispatch_s": 0, "combine_s": 0, "reference_s": 0}
    wide = sample_results.run("ht-flat", ranks=24)
    text = page(tmp_path, {"runs": [many, one, nothing, wide], "environment": {}})
    assert "2 nodes" in text
    run = load_check(tmp_path / "c.json").runs[0]
    sums = run.tier_bytes("dispatch")
    assert sum(sums.values()) == sum(map(sum, many["dispatch_bytes"]))
    across = sum(
        many["dispatch_bytes"][s][d] for s in range(8) for d in range(8) if s // 4 != d // 4
    )
    assert sums["net"] == across
    assert format_bytes(across) in text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ranks": "8"}, "ranks"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 7}, "tiers"),
        ({"ok": 1}, "ok"),
        ({"dispatch_s": -1.0}, "dispatch_s"),
        ({"dispatch_bytes": [[0] * 8] * 7}, "dispatch_bytes"),
        ({"tiers": [["wire"] * 8] * 8}, "tiers"),
        ({"received_rows": [1]}, "received_rows"),
        ({"mode": None}, "mode"),
    ],
)
def test_bad_run_is_named(tmp_path: Path, change: dict, field: str) -> None:
    check = sample_results.check(128, sample_results.MODES[:2])
    check["runs"][1] |= change
    with pytest.raises(ResultError, match=rf"bad\.json: runs\[1\].*'{field}'"):
        load_check(write(tmp_path / "bad.json", check))


def test_bad_files_fail_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "r.html"
    (tmp_path / "text.json").write_text("{")
    write(tmp_path / "list.json", [])
    write(tmp_path / "empty.json", {})
    for name in ("text", "list", "empty", "missing"):
        path = tmp_path / f"{name}.json"
        assert report.main(["--check", str(path), "-o", str(output)]) == 1
        assert str(path) in capsys.readouterr().err
    assert not output.exists()
    plan = sample_results.plan("ll", 128)
    del plan["points"][3]["combine"]["limit"]
    with pytest.raises(ResultError, match=r"points\[3\]\.combine: field 'limit'"):
        load_plan(write(tmp_path / "plan.json", plan))


def test_units() -> None:
    assert format_bytes(0) == "0"
    assert format_bytes(999) == "999 B"
    assert format_bytes(999_600) == "1.00 MB"
    assert format_bytes(14_336) == "14.3 kB"
    assert format_seconds(3.4e-6) == "3.40 µs"
    assert format_seconds(0.99996) == "1.00 s"
    assert format_seconds(75) == "75.0 s"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Figure], str, str]:
    """All figures; the page of a run, with a capacity plan's pictures; that of measurements."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *rest: object, **how: object) -> None:
        figures.append(figure)
        save(figure, *rest, **how)

    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        run = page(folder, CHECK, *PLANS)
        run += "".join(plan_plots.as_svgs(sample_capacity.plan()).values())
        assert report.main(["--measured", "-o", str(folder / "speed.html")]) == 0
    return figures, run, (folder / "speed.html").read_text("utf-8")


def test_labels_do_not_overlap(everything: tuple[list[Figure], str, str]) -> None:
    figures, _, _ = everything
    assert len(figures) > 40
    assert [pair for figure in figures for pair in overlapping(figure)] == []


def test_no_text_is_smaller_than_11_pixels(everything: tuple[list[Figure], str, str]) -> None:
    """At the least width that a picture takes."""
    pictures = re.findall(r"<svg.*?</svg>", "".join(everything[1:]), flags=re.DOTALL)
    assert len(pictures) == len(everything[0])
    for picture in pictures:
        least = float(re.search(r"min-width:(\d+)px", picture).group(1))
        width = float(re.search(r'viewBox="0 0 ([\d.]+) ', picture).group(1))
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", picture)]
        assert min(sizes) * least / width >= 11


class Boxes(HTMLParser):
    """What is around each table and picture: its open ancestors as (tag, classes)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.around: list[tuple[str, list[tuple[str, str]]]] = []
        self.styles, self.is_scaled = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag in ("table", "svg"):
            self.around.append((tag, list(self.open)))
        if tag == "meta" and of.get("name") == "viewport":
            self.is_scaled = of["content"] == "width=device-width, initial-scale=1"
        if tag not in ("meta", "link", "br", "hr", "img", "col"):
            self.open.append((tag, of.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while any(name == tag for name, _ in self.open) and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "style" and not self.styles:
            self.styles = data


PHONE = 390 - 32  # pixels beside the page's margins


def test_a_phone_has_one_column(everything: tuple[list[Figure], str, str]) -> None:
    """What may be wider than the screen scrolls in a box of its own."""
    page_of_run = everything[1].partition("</html>")[0]
    for text in (page_of_run, everything[2]):
        boxes = Boxes(text)
        assert boxes.is_scaled and len(boxes.around) > 5
        for tag, around in boxes.around:
            scrolls = [c for t, c in around if t == "figure" or "scroll" in c.split()]
            assert scrolls, (tag, around)
        rules = dict(re.findall(r"([^{}]+)\{([^{}]*)\}", boxes.styles.partition("@media")[0]))
        rules = {name.strip().rpartition("}")[2].strip(): rule for name, rule in rules.items()}
        assert "overflow-x: auto" in rules[".scroll"] and "overflow-x: auto" in rules["figure"]
        assert "overflow-wrap: anywhere" in rules["code"] + rules["pre"]
        for name, rule in rules.items():
            widths = re.findall(r"(?<!max-)(?:min-)?width: (\d+)px", rule)
            assert all(int(width) <= PHONE for width in widths), name
            for least in re.findall(r"minmax\((?!min\(100%)(\d+)px", rule):
                assert 2 * int(least) <= PHONE, name
        assert "minmax(min(100%, 400px), 1fr)" in rules[".pictures"]  # two need 816 pixels


def test_texts_fall_back_to_a_sans_serif_font(everything: tuple[list[Figure], str, str]) -> None:
    families = set(re.findall(r"font-family: ([^;]+);", "".join(everything[1:])))
    assert families == {"'DejaVu Sans', Verdana, Arial, sans-serif"}


def test_the_goals_are_on_the_page_of_measurements(
    everything: tuple[list[Figure], str, str],
) -> None:
    _, run, measured = everything
    assert "goals on 4 GPUs" in measured and "nothing was run" not in measured
    assert "goals on 4 GPUs" not in run


def test_a_run_comes_before_what_is_predicted(everything: tuple[list[Figure], str, str]) -> None:
    ids = re.findall(r'<h2 id="([a-z]+)"', everything[1])
    assert ids == ["agree", "bytes", "times", "prediction", "environment"]
