"""Capacity plans from made-up answers: verdicts, crossovers, sums, files, pictures, the page."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import sample_capacity as sample
from texts import overlapping, texts_of
from trefoil.capacity import plan_plots as capacity_plots
from trefoil.capacity import plan_text as capacity_text
from trefoil.capacity.configuration import Configuration, configuration_of
from trefoil.capacity.crossover import Crossover, Sample, crossover_of, sample_of
from trefoil.capacity.plan import CapacityPlan
from trefoil.capacity.plan_file import from_json, to_json
from trefoil.capacity.question import PlanError
from trefoil.capacity.verdict import judge
from trefoil.report import __main__ as report


def judged(**changes: object) -> CapacityPlan:
    plan = sample.plan(**changes)
    judge(plan)
    plan.crossovers = [
        x for ep in plan.question.ep_sizes if (x := crossover_of(plan.samples, ep)) is not None
    ]
    plan.links = sample.links(plan.configurations[plan.pictured or 0].nodes, 0.9)
    return plan


def find(plan: CapacityPlan, mode: str, ep: int) -> Configuration:
    return next(c for c in plan.configurations if (c.mode, c.ep) == (mode, ep))


def test_sums_by_hand() -> None:
    q = sample.question(compute_us=100.0, load="training", other_gb=2.0, weight_dtype="fp8")
    c = configuration_of(sample.answer("ht", 16), q)
    # 50 + 128 = 178 us, times 1.25; dispatch and combine half each.
    assert c.layer == pytest.approx(222.5e-6)
    assert c.interval == pytest.approx((222.5e-6 * 0.9, 222.5e-6 * 1.1))
    assert c.bound == pytest.approx(222.5e-6 * 0.8)
    assert c.communication(q) == pytest.approx(222.5e-6 * 2 * 58), "forward and backward, 58 layers"
    assert c.share(q) == pytest.approx(222.5 / 322.5)
    assert c.exposed(q) == pytest.approx(122.5e-6)
    assert c.nodes == 2 and c.replicas == 4
    # 16 experts a GPU, three matrices of 7168 x 2048, 58 layers, a byte an element and a float for
    # each 128 x 128.
    assert c.memory.weights == 16 * 3 * 7168 * 2048 * 58 * (1 + 1 / 4096)
    assert c.memory.buffers == 10**6 + 256 * 10**6 + 10**5, "host memory is not the GPU's"
    assert c.memory.total == c.memory.weights + c.memory.buffers + 10**6 + 2 * 10**9


def test_cheapest_and_why_the_others_are_not() -> None:
    # LL EP 8: 266 us * 1.125; HT EP 8: 178 us * 1.125 = 200 us, 220 us at its upper end.
    plan = judged(max_us=250.0, max_memory_gb=100.0, weight_dtype="fp8")
    assert plan.chosen is find(plan, "ht", 8)
    assert plan.pictured == plan.configurations.index(plan.chosen)
    reasons = {(c.mode, c.ep): c.reasons for c in plan.configurations}
    assert reasons["ht", 8] == []
    assert reasons["ll", 8] == ["takes 299 us, over the limit of 250 us"]
    assert reasons["ht", 16] == ["takes groups of 16 GPUs where 8 do"]
    # 178 * 1.25 = 222.5, 245 at most: fits. 178 * 1.5 = 267: does not.
    assert find(plan, "ht", 16).verdict == "meets"
    assert find(plan, "ht", 32).verdict == "misses"
    closer = judged(max_us=240.0)
    assert find(closer, "ht", 16).reasons == [
        "takes 222 us, but its interval reaches 245 us, over the limit of 240 us"
    ]
    small = judged(max_memory_gb=50.0, weight_dtype="fp8")
    assert small.chosen is find(small, "ht", 16), "as many GPUs as LL, less time"
    assert "81.8 routed experts" in find(small, "ht", 8).reasons[0]
    # (10 + 2 * 128) / (50 + 128)
    assert find(small, "ll", 16).reasons == ["takes 1.49 times as long on as many GPUs"]
    lean = judged(max_sms=8)
    assert lean.chosen is find(lean, "ll", 8)
    assert find(lean, "ht", 8).reasons == ["takes 20 SMs, over the limit of 8"]
    training = judged(load="training")
    assert find(training, "ll", 8).reasons == ["LL has no backward pass"]
    assert training.chosen is find(training, "ht", 8)
    none = judged(max_us=1.0)
    assert none.chosen is None
    assert none.pictured == none.configurations.index(find(none, "ht", 8)), "the fastest is shown"


def test_refused_memory_is_a_reason() -> None:
    q = sample.question()
    answer = sample.answer("ll", 8)
    answer["memory"] = {"output_bytes": 5, "refused": "2^62 bytes"}
    plan = CapacityPlan(q, [configuration_of(answer, q)])
    judge(plan)
    assert plan.configurations[0].reasons == ["the sizing table refuses it: 2^62 bytes"]


def test_intervals_say_where_they_do_not_cover() -> None:
    q = sample.question()
    answer = sample.answer("ll", 8)
    inside = configuration_of(answer, q)
    combine = {**answer["combine"]["interval"], "outside": "9 nodes (fitted: 1)"}
    answer["combine"] = {**answer["combine"], "interval": combine}
    outside = configuration_of(answer, q)
    plan = CapacityPlan(q, [inside, outside])
    judge(plan)
    assert [c["layer_interval_covers"] for c in to_json(plan)["configurations"]] == [True, False]
    cells = [capacity_text.row_of(c, q)[4] for c in plan.configurations]
    assert [cell.endswith("*") for cell in cells] == [False, True], "combine alone is outside"
    assert "by a wider interval: LL EP 8: 9 nodes" in capacity_text.as_text(plan)
    assert [s.covers for s in (sample_of(answer), plan_sample())] == [False, True]
    (axes,) = capacity_plots.scaling(plan).axes
    assert any(str(line.get_label()) == "extrapolated" for line in axes.lines)


def plan_sample() -> Sample:
    return sample_of(sample.answer("ll", 8))


def test_crossover_by_hand() -> None:
    samples = [sample_of(sample.answer(m, 8, t)) for m in ("ll", "ht") for t in (32, 40, 48)]
    assert crossover_of(samples, 8).tokens == pytest.approx(40, rel=1e-6)
    samples = [sample_of(sample.answer(m, 8, t)) for m in ("ll", "ht") for t in (16, 64, 256)]
    # Between 16 tokens, 42 to 66 us, and 64 tokens, 138 to 114 us:
    # 16 * 4 ^ (ln(66/42) / (ln(66/42) + ln(138/114))) = 42.39, where the curves cross at 40.
    assert crossover_of(samples, 8).tokens == pytest.approx(42.3936, rel=1e-5)
    above = [s for s in samples if s.tokens > 40]
    x = crossover_of(above, 8)
    assert (x.tokens, x.faster, x.least, x.most) == (None, "ht", 64, 256)
    below = [s for s in samples if s.tokens < 40]
    assert crossover_of(below, 8).faster == "ll"
    assert crossover_of(samples, 16) is None
    assert "from about 42 tokens" in capacity_text.crossover_sentence(crossover_of(samples, 8))


def test_files_come_back() -> None:
    plan = judged(max_us=250.0, compute_us=100.0)
    text = json.dumps(to_json(plan))
    assert from_json(json.loads(text)) == plan
    data = to_json(plan)
    for change, words in (
        ({"format": "other"}, "not a plan"),
        ({"version": 2}, "reads version 1"),
        ({"samples": [{}]}, "missing"),
        ({"question": {**data["question"], "load": "sleeping"}}, "sleeping"),
    ):
        with pytest.raises(PlanError, match=words):
            from_json({**data, **change})
    del data["links"]
    with pytest.raises(PlanError, match="'links' is missing"):
        from_json(data)


def test_json_fits_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks schemas")
    folder = Path(capacity_text.__file__).parent
    schema = json.loads((folder / "plan.schema.json").read_text())
    for plan in (judged(), judged(max_us=1.0, compute_us=5.0), judged(load="training")):
        jsonschema.Draft202012Validator(schema).validate(to_json(plan))


def test_tables() -> None:
    plan = judged(max_us=250.0, compute_us=100.0)
    rows = list(csv.DictReader(io.StringIO(capacity_text.as_csv(plan))))
    assert len(rows) == 8
    for row, c in zip(rows, plan.configurations, strict=True):
        assert float(row["layer_seconds"]) == c.layer
        assert float(row["dispatch_seconds"]) + float(row["combine_seconds"]) == c.layer
        assert row["verdict"] == c.verdict
    text = capacity_text.as_text(plan)
    markdown = capacity_text.as_markdown(plan)
    for words in (
        "cheapest",
        "HT EP 32: takes 267 us",
        "x 1.50",
        "extrapolated beyond",
        "c: buffers of the CPU library: made-up reason",
    ):
        assert words in text
        assert words in markdown
    table = [line for line in markdown.split("\n") if line.startswith("| ")]
    assert len({line.count("|") for line in table if "dispatch" in line or "µs" in line}) <= 2
    widths = {len(capacity_text.row_of(c, plan.question)) for c in plan.configurations}
    assert widths == {len(capacity_text.HEADINGS)}


def test_pictures_say_what_they_show(tmp_path: Path) -> None:
    plan = judged(max_us=250.0, max_memory_gb=200.0)
    written = capacity_plots.save_all(plan, tmp_path)
    names = [name for name, _, _ in capacity_plots.PICTURES]
    assert sorted(p.name for p in written) == sorted(
        f"{n}.{s}" for n in names for s in ("svg", "png")
    )
    for path in written:
        if path.suffix == ".svg":
            root = ElementTree.parse(path).getroot()
            words = " ".join(root.itertext())
            styles = [node.get("style", "") for node in root.iter() if "}text" in node.tag]
            least = min(float(x) for s in styles for x in re.findall(r"font-size: ([\d.]+)px", s))
            width, box = root.get("width").removesuffix("pt"), root.get("viewBox").split()
            assert least * float(width) / float(box[2]) * 4 / 3 >= 10.99, path.name
            assert all("'DejaVu Sans', Verdana, Arial, sans-serif" in s for s in styles)
            for expected in {
                "scaling": (
                    "EP size",
                    "µs",
                    "LL",
                    "HT",
                    "bound: bytes over line rate",
                    "about 90 %",
                    "extrapolated",
                    "limit 250",
                ),
                "crossover": ("tokens a GPU", "HT faster from", "µs"),
                "what-if": ("rail-fail 0, LL", "zipf 1, HT", "×"),
                "memory": ("GB of a GPU", "LL EP 64", "limit 200 GB", "cheapest"),
                "links-dispatch": ("NVLink out", "network in", "node", "busy, %"),
                "links-combine": ("HT combine, EP 8", "GPU"),
            }[path.stem]:
                assert expected in words, (path.name, expected, words)
        else:
            matplotlib = pytest.importorskip("matplotlib.image")
            pixels = matplotlib.imread(path)
            assert min(pixels.shape[:2]) > 150, path
            colours = np.ascontiguousarray(pixels * 255).astype(np.uint8).view(np.uint32)
            assert pixels.shape[2] == 4 and len(np.unique(colours)) > 50, path


def test_labels_of_memory_stand_next_to_the_limit() -> None:
    plan = judged(max_memory_gb=96.0)
    figure = capacity_plots.memory(plan)
    figure.canvas.draw()
    (axes,) = figure.axes
    limit = axes.transData.transform((96.0, 0))[0]
    shown = [t for t in axes.texts if " GB" in t.get_text() and "limit" not in t.get_text()]
    assert len(shown) == len(plan.configurations)
    totals = [c.memory.total / 1e9 for c in plan.configurations]
    assert any(80 < total < 96 for total in totals), "a label that the limit would cross"
    for t in shown:
        box = t.get_window_extent()
        assert not box.x0 < limit - 1 < box.x1 - 1, t.get_text()


@pytest.mark.parametrize("tokens", [1, 5, 64, 72, 100, 128, 300, 3000])
def test_labels_of_numbers_that_are_close_do_not_overlap(tokens: int) -> None:
    plan = judged(tokens=tokens, gpus=320, ep_sizes=[8, 60, 64, 72, 256, 320])
    plan.samples += [sample_of(sample.answer(c.mode, c.ep, tokens)) for c in plan.configurations]
    plan.crossovers = [c for c in (crossover_of(plan.samples, ep) for ep in (8, 64)) if c]
    for figure in (capacity_plots.scaling(plan), capacity_plots.crossover(plan)):
        assert list(overlapping(figure)) == []
    drawn = [t.get_text() for t in figure.axes[0].get_xticklabels()]
    assert f"{tokens:,}" in drawn, "the plan's own"


def test_the_crossover_is_named_where_there_is_room() -> None:
    for tokens in (1.2, 40.0, 1000.0):
        plan = judged()
        of = plan.configurations[plan.pictured].ep
        plan.crossovers = [Crossover(of, tokens, "ht", 1, 1024, ("made-up-ll", "made-up-ht"))]
        figure = capacity_plots.crossover(plan)
        assert list(overlapping(figure)) == []
        (box,) = (b for t, _, b in texts_of(figure) if t.startswith("HT faster"))
        inside = figure.axes[0].get_window_extent()
        assert inside.x0 <= box.x0 and box.x1 <= inside.x1, tokens


def test_lines_hold_the_numbers() -> None:
    plan = judged()
    (axes,) = capacity_plots.scaling(plan).axes
    drawn = [line.get_ydata() for line in axes.lines if len(line.get_ydata()) == 4]
    for mode in ("ll", "ht"):
        of = [c for c in plan.configurations if c.mode == mode]
        assert any(np.allclose(y, [c.layer for c in of]) for y in drawn)
        assert any(np.allclose(y, [c.bound for c in of]) for y in drawn)
    maps = capacity_plots.link_maps(plan, "dispatch")
    mesh = maps.axes[0].collections[0]
    assert np.allclose(mesh.get_array(), 90), "a node, 90 % of the time"


def test_page_holds_the_plan(tmp_path: Path) -> None:
    plan = judged(max_us=250.0, compute_us=100.0)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_json(plan)))
    output = tmp_path / "page.html"
    assert report.main(["--capacity", str(path), "-o", str(output)]) == 0
    text = output.read_text()
    assert text.count("<svg ") == len(capacity_plots.PICTURES)
    for words in ('id="capacity"', "deepseek-v3, decode", "HT in groups of 8", "over the limit"):
        assert words in text
    assert "tokens/s a GPU planned: HT, EP 8" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    path.write_text("{}")
    assert report.main(["--capacity", str(path), "-o", str(output)]) == 1
