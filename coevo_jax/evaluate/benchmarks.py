"""The benchmarks by name: how their files are read, what kind of judging they ask for, by which rule they are scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from coevo_jax.errors import UserError, nearest
from coevo_jax.evaluate import readers as rd
from coevo_jax.evaluate import rules
from coevo_jax.evaluate.rules import Rule, Scorer


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """kind: pair | list | criteria, what a system is asked for. games: of a pair, 2 asks again with the answers' places changed.
    ties, gap: defaults of its rule."""

    name: str
    kind: str
    source: rd.Source
    score: Scorer
    games: int = 1
    ties: str = "half"
    gap: float = 0.0
    expected: str = ""  # what a row holds, for messages and --help

    def rule(self, **changed: object) -> Rule:
        """The rule with its defaults, changed where a value is not None."""
        rule = Rule(ties=self.ties, gap=self.gap)
        return dataclasses.replace(rule, **{k: v for k, v in changed.items() if v is not None})  # type: ignore[arg-type]


def _pairs(name: str, source: rd.Source, expected: str, ties: str = "half", **more: object) -> Benchmark:
    return Benchmark(name, "pair", source, rules.score_pairs, games=2, ties=ties, expected=expected, **more)  # type: ignore[arg-type]


OURS = "prompt, response_a, response_b, label (A, B, tie)"
_ALL = (
    _pairs("pairs", rd.Source(rd.read_pair), OURS),
    _pairs(
        "llmbar",
        rd.Source(
            rd.coded_pair({1: "A", 2: "B"}), {"prompt": "input", "response_a": "output_1", "response_b": "output_2"}
        ),
        "input, output_1, output_2, label (1, 2)",
    ),
    _pairs(
        "pandalm", rd.Source(rd.read_pandalm), "instruction, input, response1, response2, annotator1 to annotator3", ties="wrong"
    ),
    _pairs(
        "autoj",
        rd.Source(
            rd.coded_pair({0: "A", 1: "B", 2: "tie"}),
            {"response_a": "response 1", "response_b": "response 2", "subset": "scenario"},
        ),
        "prompt, response 1, response 2, label (0, 1, 2 = tie), scenario",
        ties="wrong",
    ),
    _pairs(
        "ppe_ifeval", rd.Source(rd.read_ppe, {"id": "question_id"}), "question_id, prompt, response_1 ..., scores, conflict_pairs"
    ),
    _pairs(
        "helpsteer3",
        rd.Source(rd.read_helpsteer3),
        "context, response1, response2, overall_preference (-3 to 3), domain",
        ties="wrong",
    ),
    _pairs("writing_preference", rd.Source(rd.read_chosen, {"subset": "tag"}), "prompt, chosen, rejected, tag"),
    _pairs(
        "ultrafeedback", rd.Source(rd.read_chosen, {"id": "prompt_id"}), "prompt_id, prompt, chosen, rejected (conversations)"
    ),
    Benchmark("rewardbench", "pair", rd.Source(rd.read_chosen), rules.score_rewardbench, games=1,
              expected="prompt, chosen, rejected, subset"),
    Benchmark("judgebench", "pair", rd.Source(rd.read_judgebench, {"id": "pair_id", "prompt": "question"}),
              rules.score_judgebench, games=2, ties="wrong", expected="pair_id, source, question, response_A, response_B, label"),
    Benchmark("rewardbench2", "list", rd.Source(rd.read_rewardbench2), rules.score_rewardbench2,
              expected="id, prompt, chosen, rejected (lists), subset"),
    Benchmark("rm_bench", "list", rd.Source(rd.read_styles), rules.score_styles, ties="wrong",
              expected="prompt, chosen, rejected (three styles each), domain"),
    Benchmark("listwise", "list", rd.Source(rd.read_list), rules.score_lists, expected="prompt, responses [{text, score}]"),
    Benchmark("healthbench", "list", rd.Source(rd.read_list), rules.score_alignment, ties="wrong", gap=0.1,
              expected="prompt, answers, scores of the expert rubric"),
    Benchmark("researchqa", "list", rd.Source(rd.read_list), rules.score_alignment, ties="wrong", gap=0.05,
              expected="prompt, answers, scores of the expert rubric"),
    Benchmark(
        "infobench", "criteria", rd.Source(rd.read_criteria, {"answer": "gpt4_response", "verdicts": "gpt4_verdicts"}),
        rules.score_criteria, expected="prompt, criteria, gpt4_response, gpt4_verdicts",
    ),
)  # fmt: skip
BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}


def benchmark_of(name: str) -> Benchmark:
    """UserError for an unknown one."""
    if name not in BENCHMARKS:
        raise UserError(f"no benchmark {name!r}", where="--benchmark", expected=f"one of {', '.join(BENCHMARKS)}",
                        nearest=nearest(name, BENCHMARKS))  # fmt: skip
    return BENCHMARKS[name]
