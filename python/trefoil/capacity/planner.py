"""Asks `trefoil simulate` for each mode and EP size, in parallel; makes a plan of the answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trefoil.capacity.batch_search import Search
from trefoil.capacity.compute_costs import ComputeError
from trefoil.capacity.compute_costs import load as load_record
from trefoil.capacity.configuration import Configuration, WhatIf, configuration_of
from trefoil.capacity.crossover import crossover_of, sample_of
from trefoil.capacity.options import PASSED, WHAT_IFS, gpus_of, parse_sizes
from trefoil.capacity.plan import CapacityPlan, Smallest
from trefoil.capacity.question import (
    DEFAULT_CONTEXT,
    LOADS,
    PlanError,
    Question,
    why_no_step,
)
from trefoil.capacity.schedule import SCHEDULES
from trefoil.capacity.step import Gpu
from trefoil.capacity.terms import Terms, preset
from trefoil.capacity.verdict import fits, judge
from trefoil.capacity.whole_model import DTYPE_OF_BITS, Model, model_of
from trefoil.sweeping import Outcome, Point, key_of, link_loads, run_point, sweep

CROSSOVER_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
OTHERS_TOKENS = 1024
MOST_SIZE = 1 << 24  # tokens of a GPU or a sequence
MAX_DRAFTS = 64  # of a sequence in a step; engines draft 1 to 8
RESERVE = 0.1  # of a GPU's memory, as serving engines leave by default
# LL and HT by the costs of one library: ours within a node, where it was measured, DeepEP's across.
OF_ONE_LIBRARY: dict[bool, dict[str, dict[str, Any]]] = {
    True: {"ll": {"costs": "trefoil-ll-h200"}, "ht": {"costs": "trefoil-ht-h200"}},
    False: {
        "ll": {"costs": "deepep-ll-h100", "variant": "per-expert"},
        "ht": {"costs": "deepep-ht-h100"},
    },
}


_probed: dict[str, str] = {}  # answers of probes, by their points' keys


def _without_what_ifs(point: Point) -> dict[str, Any]:
    return {k: v for k, v in point.items() if k not in {name for name, _, _ in WHAT_IFS}}


def pairs_of(q: Question) -> list[tuple[str, int]]:
    """Mode and EP size of each configuration."""
    return [(mode, ep) for mode in q.modes for ep in q.ep_sizes]


def half_of(tokens: int) -> int:
    """Of a micro-batch: the larger of two."""
    return -(-tokens // 2)


class Planner:
    """One run: the question, and the points that it asks simulate about."""

    def __init__(self, options: argparse.Namespace, program: str) -> None:
        self.options = options
        self.program = program
        self.base: dict[str, Any] = {"cluster": options.cluster, "moe": options.moe}
        for name in PASSED:
            value = getattr(options, name)
            if value is not None:
                self.base[name] = value
        if options.grouped:
            self.base["grouped"] = True
        self.load = options.load or "decode"
        self.batches = self._sizes(options.tokens or str(LOADS[self.load][0]), "--tokens")
        self.contexts = self._sizes(options.context or str(DEFAULT_CONTEXT), "--context")
        self.costs = {"ll": options.costs_ll, "ht": options.costs_ht}
        self.terms = self._terms()
        self.question = self._question()

    @staticmethod
    def _sizes(text: str, option: str) -> list[int]:
        sizes = parse_sizes(text, option)
        if max(sizes) > MOST_SIZE:
            raise PlanError(f"{option} {max(sizes)}: at most {MOST_SIZE:,}")
        return sizes

    def _terms(self) -> Terms:
        """As said, else the presets."""
        o = self.options

        def said(name: str) -> Any:
            value = getattr(o, name)
            return preset(name) if value is None else value

        imbalance, wait = said("imbalance"), 1.0
        if self.load == "prefill":  # one of the two: both are of unequal experts
            wait = 1.0 if o.prefill_wait is None else o.prefill_wait
            wait = said("prefill_wait") if o.imbalance is None else wait
            imbalance = 1.0 if o.imbalance is None else o.imbalance
        elif o.prefill_wait is not None:
            raise PlanError(f"--prefill-wait {o.prefill_wait:g}: of prefill, this is {self.load}")
        terms = Terms(
            drafts=said("drafts"),
            acceptance=said("acceptance"),
            attention_dtype=said("attention_dtype"),
            fp4_rate=said("fp4_rate"),
            imbalance=imbalance,
            prefill_wait=wait,
            batch_imbalance=said("batch_imbalance"),
            interference=said("interference"),
            host_ms=said("host_ms"),
        )
        if terms.drafts and self.load != "decode":
            raise PlanError(f"--drafts {terms.drafts}: of decode alone, this is {self.load}")
        if terms.drafts > MAX_DRAFTS:
            raise PlanError(f"--drafts {terms.drafts}: at most {MAX_DRAFTS}")
        if terms.acceptance > 1:
            raise PlanError(f"--acceptance {terms.acceptance:g}: a share, 0 to 1")
        if not 0 < terms.interference <= 1:
            raise PlanError(f"--interference {terms.interference:g}: a speed, above 0 to 1")
        if terms.fp4_rate <= 0:
            raise PlanError("--fp4-rate 0: more than 0")
        for name in ("imbalance", "batch_imbalance", "prefill_wait"):
            if getattr(terms, name) < 1:
                option = "--" + name.replace("_", "-")
                raise PlanError(f"{option} {getattr(terms, name):g}: busiest over mean, 1 or more")
        return terms

    @property
    def is_search(self) -> bool:
        return len(self.batches) * len(self.contexts) > 1

    def _probe(self) -> dict[str, Any]:
        """What the presets say: one tiny point in closed form, asked once."""
        point = {**self.base, "gpus": 1, "tokens": 1, "engine": "closed-form"}
        key = key_of(point, self.program)
        if key not in _probed:
            text, refusal = run_point(self.program, point)
            if refusal:
                raise PlanError(refusal)
            _probed[key] = text
        return json.loads(_probed[key])

    def _question(self) -> Question:
        o, facts = self.options, self._probe()
        self.physical = facts["physical_experts"]
        self.gpus_per_node, self.most_gpus = facts["gpus_per_node"], facts["max_gpus"]
        most = min(self.physical, facts["max_gpus"])
        said = gpus_of(o)
        gpus = most if said is None else said
        if o.budget_hour is not None and not o.gpus:
            gpus = min(gpus, facts["max_gpus"])
        if not 1 <= gpus <= facts["max_gpus"]:
            raise PlanError(
                f"--gpus {gpus}: cluster {facts['cluster']} speaks for 1 to {facts['max_gpus']}"
            )
        modes = o.mode.split(",")
        if len({mode[:2] for mode in modes}) < len(modes):
            raise PlanError(
                f"--mode {o.mode}: one layout of each mode, as in ll-rank-major,ht-flat"
            )
        groups, chosen = facts["model"]["num_groups"], facts["model"]["topk_groups"]
        if groups and o.grouped is not False:
            self.base["grouped"] = True
        details = [f"experts of {chosen} of {groups} groups"] if "grouped" in self.base else []
        details += [f"{k.replace('_', '-')} {v}" for k, v in self.base.items() if k in PASSED]
        model, missing = model_of(facts)
        weights = o.weight_dtype or DTYPE_OF_BITS.get(facts["model"]["weight_bits"], "bf16")
        if weights == "fp8" and o.dispatch_dtype is None and self.load != "training":
            self.base["dispatch_dtype"] = "fp8"
            details.append("dispatch in fp8, as the weights")
        self.ep_sizes = self._ep_sizes(gpus, facts)
        gpu = self._gpu(facts)
        if gpu is not None and o.fp4_rate is None:
            self.terms = replace(self.terms, fp4_rate=gpu.fp4_rate)
        q = Question(
            cluster=facts["cluster"],
            moe=facts["moe"],
            load=self.load,
            tokens=self.batches[0],
            gpus=gpus,
            modes=modes,
            ep_sizes=self.ep_sizes,
            moe_layers=facts["moe_layers"],
            compute_us=o.compute_us,
            max_us=o.max_us,
            max_memory_gb=o.max_memory_gb,
            max_sms=o.max_sms,
            weight_dtype=weights,
            other_gb=o.other_gb,
            details=", ".join(details),
            gpu_memory_gb=facts["gpu_memory_gb"],
            reserve_gb=self._reserve(facts["gpu_memory_gb"]),
            gpus_per_node=facts["gpus_per_node"],
            gpus_per_host=facts["gpus_per_host"],
            dispatch_dtype=self.base.get("dispatch_dtype", "bf16"),
            context=self.contexts[0],
            cached=self._cached(self.contexts[0]),
            attention_tp=self._attention_tp(facts, model),
            kv_dtype=o.kv_dtype,
            max_step_ms=o.max_step_ms,
            model=model,
            missing=missing,
            gpu=gpu,
            gpu_hour_usd=o.gpu_hour,
            gpu_watts=o.gpu_watts,
            compute_costs=o.compute_costs,
            compute_gpu=self._compute_gpu(),
            overlaps=self._overlaps(),
            terms=self.terms,
        )
        of_a_step = {"--max-step-ms": o.max_step_ms, "--gpu-hour": o.gpu_hour}
        for option, value in {**of_a_step, "--gpu-watts": o.gpu_watts}.items():
            if value is not None and not q.is_whole:
                raise PlanError(f"{option}: {why_no_step(q)}; --compute-us would say it")
        return q

    def _attention_tp(self, facts: dict[str, Any], model: Model | None) -> int:
        n = self.options.attention_tp
        if n == 1:
            return n
        if model is None:
            raise PlanError(f"--attention-tp {n}: the file of {facts['moe']} states no attention")
        wholes = {
            f"the {self.gpus_per_node} GPUs of a node of {facts['cluster']}": self.gpus_per_node,
            f"the {model.num_heads} heads of {facts['moe']}": model.num_heads,
            **{f"EP {ep}": ep for ep in self.ep_sizes},
        }
        for whole, count in wholes.items():
            if count % n:
                raise PlanError(f"--attention-tp {n}: does not divide {whole}")
        return n

    def _cached(self, context: int) -> int:
        """Of a prompt's tokens; one at least is computed."""
        share = self.options.cached
        if not 0 <= share < 1:
            raise PlanError(f"--cached {share:g}: a share of the input, less than 1")
        if share and self.load != "prefill":
            raise PlanError(f"--cached {share:g}: of prefill alone, this is {self.load}")
        return min(context - 1, round(share * context))

    def _compute_gpu(self) -> str:
        try:
            record = load_record(self.options.compute_costs)
        except ComputeError as error:
            raise PlanError(f"--compute-costs: {error}") from error
        return record.gpu if record else ""

    def _overlaps(self) -> list[str]:
        said = self.options.overlap.split(",")
        for how in said:
            if how not in SCHEDULES:
                raise PlanError(f"--overlap {how}: expected {', '.join(SCHEDULES)}")
        return list(dict.fromkeys(said))

    @staticmethod
    def _gpu(facts: dict[str, Any]) -> Gpu | None:
        hbm, bf16 = facts["gpu_hbm_gb_per_s"], facts["gpu_bf16_tflops"]
        if not hbm or not bf16:
            return None
        fp8, fp4 = facts["gpu_fp8_tflops"], facts["gpu_fp4_tflops"]
        nvlink = facts["nvlink_gb_per_s"], facts["ll_fixed_us"]
        return Gpu(hbm, bf16, fp8, fp4, facts["gpu_sms"], *nvlink)

    def _reserve(self, memory_gb: float | None) -> float:
        said = self.options.reserve_gb
        if memory_gb is None:
            if said is not None:
                raise PlanError("--reserve-gb: the cluster does not state gpu_memory_gb")
            return 0.0
        if said is not None and said >= memory_gb:
            raise PlanError(f"--reserve-gb {said:g}: a GPU has {memory_gb:g} GB")
        return round(memory_gb * RESERVE, 1) if said is None else said

    def _ep_sizes(self, gpus: int, facts: dict[str, Any]) -> list[int]:
        """As asked for; else doubling from a node up, as far as experts and GPUs go."""
        said = "physical_experts" in self.base
        most = min(self.physical, gpus)
        if self.options.ep:
            sizes = parse_sizes(self.options.ep)
            for size in sizes:
                if size > gpus:
                    raise PlanError(f"--ep {size}: there are {gpus} GPUs")
                if size > self.physical and said:
                    raise PlanError(
                        f"--ep {size}: an EP size is at most the {self.physical} physical experts; "
                        "without --physical-experts there are as many as are needed"
                    )
            return sizes
        size = min(facts["gpus_per_node"], most)
        sizes = []
        while size <= most:
            sizes.append(size)
            size *= 2
        return sizes if most in sizes else [*sizes, most]

    def point(self, mode: str, ep: int, tokens: int, **more: Any) -> Point:
        kind = "ht" if mode.startswith("ht") else "ll"
        rows = tokens * self.terms.rows
        point = {**self.base, "mode": mode, "gpus": ep, "ep": ep, "tokens": rows, **more}
        if self.costs[kind]:
            point["costs"] = self.costs[kind]
        elif self._is_of_one_library():
            point.update(OF_ONE_LIBRARY[max(self.ep_sizes) <= self.gpus_per_node][kind])
        if "physical_experts" not in self.base and self.physical % ep:
            # Redundant copies, as few as let every GPU have as many experts.
            point["physical_experts"] = -(-self.physical // ep) * ep
        if "trace" in point:
            del point["tokens"]
            point.pop("grouped", None)  # a trace has its own
        if mode.startswith("ht"):
            point.pop("combine", None)  # HT has one way to combine
        return point

    def _is_of_one_library(self) -> bool:
        """Nobody said whose costs or rows."""
        said = any(self.costs.values()) or "variant" in self.base
        return not said and self.base.get("engine") != "closed-form"

    def sweep(self, points: Iterable[Point], label: str) -> list[Outcome]:
        return sweep(
            points,
            results=self.options.resume,
            program=self.program,
            jobs=self.options.jobs,
            label=label,
            together=True,
        )

    # ---- The parts of a plan ----

    def plan(self) -> CapacityPlan:
        q = self.question
        pairs = pairs_of(q)
        plan = CapacityPlan(q, self.configurations(q))
        self._what_if(plan, pairs)
        self._largest(plan, pairs)
        judge(plan)
        if not any(fits(c, q) for c in plan.configurations):
            plan.smallest = self._smallest(q)
        elif self._wants_crossover():
            self._crossovers(plan)
        if plan.pictured is not None and self._is_kept() and self.options.engine != "closed-form":
            mode, ep = pairs[plan.pictured]
            plan.links = link_loads(self.point(mode, ep, q.tokens), self.program)
        return plan

    def configurations(self, q: Question) -> list[Configuration]:
        """One a mode and EP size; with two batches in a step half the tokens are asked for, too."""
        pairs = pairs_of(q)
        points = [self.point(m, e, q.tokens) for m, e in pairs]
        halves = []
        if self._wants_halves(q):
            halves = [self.point(m, e, half_of(q.tokens)) for m, e in pairs]
        outcomes = self.sweep([*points, *halves], "configurations")
        for o in outcomes:
            if o.refusal:
                raise PlanError(o.refusal)
        answers = [o.answer for o in outcomes]
        of_half = answers[len(points) :] or [None] * len(points)
        return [
            configuration_of(answer, q, half)
            for answer, half in zip(answers[: len(points)], of_half, strict=True)
        ]

    @staticmethod
    def _wants_halves(q: Question) -> bool:
        is_timed = q.is_whole and q.compute_us is None
        return is_timed and "two-batch" in q.overlaps and q.tokens > 1

    def search(self, is_enough: Callable[[Search, int], bool] | None = None) -> Search:
        """Every batch and context; points that make no sense are named and left out. is_enough: by
        EP size, the smallest first, until it says of what was found that the next one adds nothing.
        """
        q = self.question
        if not q.is_whole:
            raise PlanError(f"a search ranks steps: {why_no_step(q)}")
        if given := self._given_what_ifs():
            option = "--" + given[0][0].replace("_", "-")
            raise PlanError(f"{option}: a what-if is of one plan: one --tokens and one --context")
        questions = [
            replace(q, tokens=n, context=context, cached=self._cached(context))
            for context in self.contexts
            for n in self.batches
        ]
        found = Search([CapacityPlan(of, []) for of in questions])
        for sizes in [[ep] for ep in sorted(q.ep_sizes)] if is_enough else [q.ep_sizes]:
            if is_enough and is_enough(found, sizes[0]):
                break
            self._search_sizes(found, sizes)
        if not any(plan.configurations for plan in found.plans):
            raise PlanError(found.refused[0])
        for plan in found.plans:
            judge(plan)
        return found

    def _search_sizes(self, found: Search, sizes: list[int]) -> None:
        """Adds the configurations of these EP sizes."""
        questions = [plan.question for plan in found.plans]
        pairs = pairs_of(replace(self.question, ep_sizes=sizes))
        halves = {half_of(n.tokens) for n in questions if self._wants_halves(n)}
        keys = [(m, e, n) for n in sorted({*self.batches, *halves}) for m, e in pairs]
        outcomes = self.sweep([self.point(*key) for key in keys], "search")
        answers = {key: o.answer for key, o in zip(keys, outcomes, strict=True) if o.answer}
        for plan, of in zip(found.plans, questions, strict=True):
            plan.configurations += [
                configuration_of(
                    answers[m, e, of.tokens], of, answers.get((m, e, half_of(of.tokens)))
                )
                for m, e in pairs
                if (m, e, of.tokens) in answers
            ]
        found.refused += [o.refusal for o in outcomes if o.refusal]

    def _is_kept(self) -> bool:
        """The plan goes to files or programs: whole, whatever the time."""
        return bool(self.options.output or self.options.json)

    def _wants_crossover(self) -> bool:
        said = self.options.crossover
        return self._is_kept() if said is None else said

    def _largest(self, plan: CapacityPlan, pairs: Sequence[tuple[str, int]]) -> None:
        """The most tokens a GPU that fit: a line through what is known, asked again until the
        sizing functions agree. Counted where a batch is KV cache."""
        q = plan.question
        if q.model is None or q.usable_gb is None or q.load != "decode":
            return
        known = [[(q.tokens, c.memory.total)] for c in plan.configurations]
        for turn in range(4):
            guesses = [
                None if c.memory.refused else next_guess(points, q.usable_gb * 1e9, fixed_of(c))
                for c, points in zip(plan.configurations, known, strict=True)
            ]
            asked = [(i, n) for i, n in enumerate(guesses) if n is not None]
            if not asked or turn == 3:
                break
            answers = self.sweep(
                [{**self.point(*pairs[i], n), "engine": "closed-form"} for i, n in asked],
                "largest batch",
            )
            for (i, n), outcome in zip(asked, answers, strict=True):
                c = configuration_of(outcome.answer, q) if outcome.answer else None
                refused = c is None or c.memory.refused
                known[i].append((n, REFUSED if refused else c.memory.total))
        for c, points in zip(plan.configurations, known, strict=True):
            fitting = [n for n, total in points if total <= q.usable_gb * 1e9]
            c.max_tokens = None if c.memory.refused else max(fitting, default=0)

    def _smallest(self, q: Question) -> Smallest:
        """The EP sizes beyond those that were asked for, doubling, until one fits: by the closed
        form, which knows memory as the replay does."""
        ep = 2 * max(q.ep_sizes)
        while ep <= min(self.most_gpus, self.physical):
            for mode in q.modes:
                point = {**self.point(mode, ep, q.tokens), "engine": "closed-form"}
                text, refusal = run_point(self.program, _without_what_ifs(point))
                if refusal:
                    continue
                c = configuration_of(json.loads(text), q)
                if not c.memory.refused and fits(c, q):
                    return Smallest(c.mode, ep, c.memory.total)
            ep *= 2
        return Smallest("", 0, 0)

    def _what_if(self, plan: CapacityPlan, pairs: Sequence[tuple[str, int]]) -> None:
        q = self.question
        cases = [
            (c, pair, name, value)
            for c, pair in zip(plan.configurations, pairs, strict=True)
            for name, value in self._given_what_ifs()
        ]
        points = [self.point(*pair, q.tokens, **{name: v}) for _, pair, name, v in cases]
        answers = self.sweep(points, "what if")
        halves: list[dict[str, Any] | None] = [None] * len(cases)
        if self._wants_halves(q):  # a trace has its tokens, and no half of them
            at = [i for i, case in enumerate(cases) if case[2] != "trace" and answers[i].answer]
            few = [{**points[i], "tokens": half_of(q.tokens) * self.terms.rows} for i in at]
            for i, outcome in zip(at, self.sweep(few, "what if"), strict=True):
                halves[i] = outcome.answer
        tokens = {
            case[2]: o.answer["tokens"] for case, o in zip(cases, answers, strict=True) if o.answer
        }
        for (c, pair, name, value), outcome, half in zip(cases, answers, halves, strict=True):
            shown = f"{name.replace('_', '-')} {Path(value).name if name == 'trace' else value}"
            if name == "trace" and name in tokens:  # its own
                shown += f" ({tokens[name]:,} tokens a GPU)"
            if outcome.answer is None:
                c.what_if.append(WhatIf(shown, None, None, f"EP {c.ep}: {outcome.refusal}"))
            else:
                c.what_if.append(self._changed(c, pair, shown, outcome.answer, half))

    def _given_what_ifs(self) -> list[tuple[str, Any]]:
        said = ((name, getattr(self.options, name)) for name, _, _ in WHAT_IFS)
        return [(name, value) for name, value in said if value]

    def _changed(
        self,
        c: Configuration,
        pair: tuple[str, int],
        shown: str,
        answer: dict[str, Any],
        half: dict[str, Any] | None,
    ) -> WhatIf:
        """Against the same without the change, at the same number of tokens: a trace has its own,
        and is compared without two batches."""
        q, rows = self.question, self.terms.rows
        if shown.startswith("trace"):
            q = replace(q, tokens=-(-answer["tokens"] // rows))
            point = {**self.point(*pair, q.tokens), "tokens": answer["tokens"]}
            (same,) = self.sweep([point], "what if")
            if same.answer is None:
                return WhatIf(shown, None, None, f"EP {c.ep}: {same.refusal}")
            c = configuration_of(same.answer, q)
        changed = configuration_of(answer, q, half)
        before, after = c.step(q), changed.step(q)
        ratio = after / before if before and after else None
        return WhatIf(shown, changed.layer, changed.layer / c.layer, "", ratio)

    def _crossovers(self, plan: CapacityPlan) -> None:
        """LL and HT at more and more tokens: for the pictured EP size all of them, for the others
        until HT is faster or OTHERS_TOKENS is reached."""
        q = plan.question
        ll = next((m for m in q.modes if m.startswith("ll")), None)
        ht = next((m for m in q.modes if m.startswith("ht")), None)
        if not ll or not ht or plan.pictured is None:
            return
        shown = plan.configurations[plan.pictured].ep
        open_sizes = [
            ep for ep in q.ep_sizes if ep in {c.ep for c in plan.configurations if fits(c, q)}
        ]
        for tokens in sorted({*CROSSOVER_TOKENS, q.tokens}):
            if tokens > max(OTHERS_TOKENS, q.tokens):
                open_sizes = [shown]
            points = [self._compared(m, ep, tokens) for ep in open_sizes for m in (ll, ht)]
            outcomes = self.sweep(points, f"LL or HT at {tokens} tokens")
            plan.samples += [sample_of(o.answer) for o in outcomes if o.answer]
            open_sizes = [ep for ep in open_sizes if ep == shown or not self._crossed(plan, ep)]
        found = (crossover_of(plan.samples, ep) for ep in q.ep_sizes)
        plan.crossovers = [x for x in found if x is not None]

    def _compared(self, mode: str, ep: int, tokens: int) -> Point:
        """A point of LL against HT: by one library for this EP size, unless costs or rows were
        said."""
        point = self.point(mode, ep, tokens)
        if self._is_of_one_library():
            point.update(OF_ONE_LIBRARY[ep <= self.gpus_per_node][mode[:2]])
        return point

    @staticmethod
    def _crossed(plan: CapacityPlan, ep: int) -> bool:
        x = crossover_of(plan.samples, ep)
        return x is not None and (x.tokens is not None or x.faster == "ht")


REFUSED = 1 << 62


def fixed_of(c: Configuration) -> int:
    """Memory that does not grow with the batch."""
    m = c.memory
    return m.weights + m.attention + m.shared + m.embeddings + m.other


def next_guess(points: Sequence[tuple[int, int]], usable: float, fixed: int) -> int | None:
    """The number of tokens to ask about next; None: the largest that fits is known well enough (to
    1 %), or nothing fits. Points are (tokens, memory in all)."""
    fitting = max((p for p in points if p[1] <= usable), default=(0, fixed))
    over = min((p for p in points if p[1] > usable), default=None)
    if fixed >= usable:
        return None
    if over is not None and over[0] <= max(fitting[0] * 1.01, fitting[0] + 1):
        return None
    if over is not None and over[1] < REFUSED:
        slope = (over[1] - fitting[1]) / (over[0] - fitting[0])
    elif fitting[0]:
        slope = (fitting[1] - fixed) / fitting[0]
    else:
        return None if over is None else over[0] // 2 or None
    guess = fitting[0] + int((usable - fitting[1]) / slope)
    if over is not None:
        guess = min(guess, over[0] - 1)
    return guess if guess > fitting[0] else None
