"""From what a system said of a benchmark's examples to its Score: one function a kind of example.

Every Score has ties and failures beside it, a strict number, and an interval; `rule` says in words what was counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from coevo_jax.evaluate import reward_bench as rb
from coevo_jax.evaluate import rules_lists as rl
from coevo_jax.evaluate import rules_pairs as rp
from coevo_jax.evaluate.intervals import Stratum, bootstrap, estimate, mean_of, ratio_of
from coevo_jax.evaluate.records import Example, Judged, Score
from coevo_jax.judges.agreement import cohen_kappa, spearman

Rows = Sequence[tuple[Example, Judged]]
NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Settings of a score. ties: half | wrong | leave_out; margin: scores that differ by at most so much tie; gap: of the
    reference scores, from which a pair counts in the second accuracy of an alignment."""

    ties: str = "half"
    margin: float = 0.0
    gap: float = 0.0
    seed: int = 0
    draws: int = 10_000


Scorer = Callable[[Rows, Rule], Score]


def _score(
    rule: Rule, words: str, strata: Sequence[Stratum], strict: float, shares: tuple[float, float], n: int,
    parts: dict[str, float | None] | None = None, subsets: dict[str, tuple[float, int]] | None = None,
) -> Score:  # fmt: skip
    low, high = bootstrap(strata, rule.seed, rule.draws)
    return Score(words, n, estimate(strata), strict, *shares, low, high, parts or {}, subsets or {})


def by_subset(rows: Rows, values: Sequence[float]) -> dict[str, tuple[float, int]]:
    """Mean and number of examples of each subset, in the order of the file; nothing where there are no subsets."""
    names = list(dict.fromkeys(example.subset for example, _ in rows))
    if names in ([""], []):
        return {}
    out = {}
    for name in names:
        own = [value for (example, _), value in zip(rows, values) if example.subset == name]
        out[name] = (_mean(own), len(own))
    return out


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not np.isnan(v)]
    return float(np.mean(known)) if known else NAN


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# --------------------------------------------------------------------------------------------------------------- pairs


def choices_of(rows: Rows, margin: float) -> list[tuple[rp.Choice, ...]]:
    """Decisions of each pair, one a game."""
    return [tuple(rp.choice_of(game, margin) for game in judged.games) for _, judged in rows]


def _decisions(choices: Sequence[Sequence[rp.Choice]]) -> tuple[float, float]:
    """(ties among the decisions, failures among the games)."""
    every = [choice for own in choices for choice in own]
    decided = [choice for choice in every if choice is not None]
    return _share(decided.count("tie"), len(decided)), _share(len(every) - len(decided), len(every))


def _pair_parts(rows: Rows, choices: Sequence[Sequence[rp.Choice]]) -> dict[str, float | None]:
    """Numbers that every benchmark of pairs has beside its score."""
    labels = [example.label for example, _ in rows]
    lengths = [(len(example.answers[0]), len(example.answers[1])) for example, _ in rows]
    every = [(c, label, size) for own, label, size in zip(choices, labels, lengths) for c in own]
    decided = [rp.credit(c, label, "half") for c, label, _ in every if c is not None]
    return {
        "answered": _mean(decided) if decided else None,
        "both_consistent": _mean([rp.both_consistent(own, label) for own, label in zip(choices, labels)]),
        "order_flip_share": rp.order_share(choices),
        "slot_a_share": rp.slot_share(choices),
        "longer_share": rp.longer_share([c for c, _, _ in every], [size for *_, size in every]),
        "label_longer_share": rp.longer_share(labels, lengths),
        "kappa": rp.kappa([c for c, _, _ in every], [label for _, label, _ in every]),
    }


def score_pairs(rows: Rows, rule: Rule) -> Score:
    """Mean over the games of what their decisions are worth; failures are worth nothing."""
    choices = choices_of(rows, rule.margin)
    labels = [example.label for example, _ in rows]
    credits = [rp.game_credit(own, label, rule.ties) for own, label in zip(choices, labels)]
    strict = _mean([rp.game_credit(own, label, "wrong") for own, label in zip(choices, labels)])
    words = {"half": "a tie is half a point", "wrong": "a tie is wrong", "leave_out": "ties are left out"}[rule.ties]
    parts = _pair_parts(rows, choices) | _people_parts(rows, choices)
    strata = [Stratum("all", len(rows), mean_of(credits))]
    return _score(rule, f"accuracy, mean over the games; {words}, a failure wrong", strata, strict, _decisions(choices),
                  len(rows), parts, by_subset(rows, credits))  # fmt: skip


def _people_parts(rows: Rows, choices: Sequence[Sequence[rp.Choice]]) -> dict[str, float | None]:
    """Where labels may be ties or come from several people."""
    labels = [example.label for example, _ in rows]
    people = [example.annotators for example, _ in rows]
    every = [(c, label, own) for given, label, own in zip(choices, labels, people) for c in given]
    parts: dict[str, float | None] = {}
    if "tie" in labels:
        parts |= rp.macro_scores([c for c, _, _ in every], [label for _, label, _ in every])
        parts["untied_labels"] = _mean([rp.credit(c, label, "wrong") for c, label, _ in every if label != "tie"])
    if any(people):
        parts["annotator_agreement"] = rp.annotator_agreement([c for c, _, _ in every], [own for *_, own in every])
        parts["human_agreement"] = rp.human_agreement(people)
    return parts


def score_judgebench(rows: Rows, rule: Rule) -> Score:
    """JudgeBench: right when more of the two games name the label than the other answer; strict: both do."""
    choices = choices_of(rows, rule.margin)
    labels = [example.label for example, _ in rows]
    votes = [float(rp.vote(own, label)) for own, label in zip(choices, labels)]
    both = _mean([rp.both_consistent(own, label) for own, label in zip(choices, labels)])
    subsets = by_subset(rows, votes)
    games = [rp.game_credit(own, label, "wrong") for own, label in zip(choices, labels)]
    parts = {
        "category_mean": float(np.mean([value for value, _ in subsets.values()])) if subsets else None,
        "single_game": _mean([rp.credit(own[0], label, "wrong") for own, label in zip(choices, labels) if own]),
        "game_mean": _mean(games),
        **_pair_parts(rows, choices),
    }
    words = "vote of two games: right + tie and right + failure are right, right + wrong is not; strict: both games right"
    strata = [Stratum("all", len(rows), mean_of(votes))]
    return _score(rule, words, strata, both, _decisions(choices), len(rows), parts, subsets)


def score_rewardbench(rows: Rows, rule: Rule) -> Score:
    """RewardBench 1: weighted sections. ties=half is its rule for generative judges (a tie or a failure is half a point),
    ties=wrong that for reward models (a tie is a loss, and so is a failure here)."""
    choices = choices_of(rows, rule.margin)
    credits, stricts = [], []
    for (example, _), own in zip(rows, choices):
        failed = 0.5 if rule.ties == "half" else 0.0
        credits.append(_mean([failed if c is None else rp.credit(c, example.label, rule.ties) for c in own]))
        stricts.append(rp.game_credit(own, example.label, "wrong"))
    subsets, strict = by_subset(rows, credits), by_subset(rows, stricts)
    weights = rb.section_weights(list(subsets))
    strata = [
        Stratum(name, n, mean_of([c for (e, _), c in zip(rows, credits) if e.subset == name]), weights[name])
        for name, (_, n) in subsets.items()
        if name in weights
    ]
    known = sum(weights[name] for name in strict if name in weights)
    strict_score = sum(strict[n][0] * weights[n] for n in strict if n in weights) / known if known else NAN
    parts: dict[str, float | None] = {
        f"section/{n}": v for n, v in rb.section_scores({k: v for k, (v, _) in subsets.items()}).items()
    }
    words = "sections by published counts, Prior Sets at half weight; " + (
        "a tie or failure is half a point (generative)" if rule.ties == "half" else "a tie is a loss (reward models)"
    )
    return _score(rule, words, strata, strict_score, _decisions(choices), len(rows), parts | _pair_parts(rows, choices), subsets)


# --------------------------------------------------------------------------------------------------------------- lists


def score_rewardbench2(rows: Rows, rule: Rule) -> Score:
    """RewardBench 2: the unweighted mean of its subsets; best of four with shared credit, Ties by its formula."""
    names = [n for n in rb.SUBSETS_2 if any(e.subset == n for e, _ in rows)]
    names += sorted({e.subset for e, _ in rows} - set(names))
    strata, strict, subsets, tied, failed = [], [], {}, [], 0
    for name in names:
        own = [(e, j.games[0]) for e, j in rows if e.subset == name]
        failed += sum(None in scores for _, scores in own)
        if name == rb.TIES:
            found = _ties_rows(own)
            size, statistic = rb.ties_statistic(found["tied"], found["ref"])
            strata.append(Stratum(name, size, statistic))
            strict.append(strata[-1].value())
        else:
            right = [int(sum(e.scores)) for e, _ in own]
            strata.append(Stratum(name, len(own), mean_of([rb.best_of(s, r) for (_, s), r in zip(own, right)])))
            strict.append(_mean([rb.best_of_strict(s, r) for (_, s), r in zip(own, right)]))
            tied += [_top_shared(s) for _, s in own]
        subsets[name] = (strata[-1].value(), len(own))
    words = "unweighted mean of the subsets; best of four: credit shared at the top, failed scores left out, all failed 1/4; "
    words += "Ties by its formula"
    shares = _share(sum(tied), len(tied)), _share(failed, len(rows))
    return _score(rule, words, strata, float(np.mean(strict)) if strict else NAN, shares, len(rows), {}, subsets)


def _ties_rows(own: Sequence[tuple[Example, Sequence[float | None]]]) -> dict[str, dict[str, rb.TiesRow]]:
    found: dict[str, dict[str, rb.TiesRow]] = {"tied": {}, "ref": {}}
    for example, scores in own:
        kind, name = rb.ties_id(example.id)
        if kind:
            found[kind][name] = rb.ties_row(tuple(scores), int(sum(example.scores)))
    return found


def _top_shared(scores: Sequence[float | None]) -> bool:
    known = [s for s in scores if s is not None]
    return bool(known) and known.count(max(known)) > 1


def score_styles(rows: Rows, rule: Rule) -> Score:
    """RM-Bench: share of (style, style) pairs in which the chosen answer scores higher, mean of easy, normal and hard."""
    found: dict[str, list[float]] = {"easy": [], "normal": [], "hard": []}
    ties = failed = total = 0
    for example, judged in rows:
        scores, styles = judged.games[0], len(example.answers) // 2
        matrix = rl.style_matrix(scores, styles)
        for name, mask in rl.style_masks(styles).items():
            found[name].append(float(np.mean(np.nan_to_num(matrix[mask], nan=0.0))) if mask.any() else NAN)
        pairs = [(a, b) for a in scores[:styles] for b in scores[styles:]]
        total += len(pairs)
        failed += sum(a is None or b is None for a, b in pairs)
        ties += sum(a is not None and a == b for a, b in pairs)
    strata = [Stratum(name, len(rows), mean_of(values)) for name, values in found.items()]
    parts: dict[str, float | None] = {name: _mean(values) for name, values in found.items()}
    means = [_mean(values) for values in zip(*found.values())]
    score = estimate(strata)
    words = "mean of easy, normal and hard over a 3 x 3 matrix of styles; a tie or failure is no win"
    return _score(rule, words, strata, score, (_share(ties, total - failed), _share(failed, total)), len(rows), parts,
                  by_subset(rows, means))  # fmt: skip


def score_lists(rows: Rows, rule: Rule) -> Score:
    """Rankings: pair accuracy, mean over the lists; Kendall's tau-b and top-1 beside it. A list without a pair takes no part."""
    counts = [rl.pair_counts(judged.games[0], example.scores) for example, judged in rows]
    half = {"half": 0.5, "wrong": 0.0, "leave_out": 0.0}[rule.ties]
    accuracy, strict = [], []
    for c in counts:
        below = c.total - (c.tied if rule.ties == "leave_out" else 0)
        accuracy.append((c.right + half * c.tied) / below if below else NAN)
        strict.append(c.right / c.total if c.total else NAN)
    taus = [rl.tau(judged.games[0], example.scores) for example, judged in rows]
    tops = [rl.top_one(judged.games[0], example.scores) for example, judged in rows]
    total, failed = sum(c.total for c in counts), sum(c.failed for c in counts)
    parts: dict[str, float | None] = {
        "kendall_tau": _mean([t for t in taus if t is not None]),
        "top_1": _mean([t for t in tops if t is not None]),
        "pairs": float(total),
        "lists_without_a_pair": float(sum(c.total == 0 for c in counts)),
    }
    words = "pair accuracy, mean over lists" + {"half": "; a tie is half a point", "wrong": "; a tie is wrong"}.get(rule.ties, "")
    shares = _share(sum(c.tied for c in counts), total - failed), _share(failed, total)
    return _score(rule, words, [Stratum("all", len(rows), mean_of(accuracy))], _mean(strict), shares, len(rows), parts,
                  by_subset(rows, accuracy))  # fmt: skip


def score_alignment(rows: Rows, rule: Rule) -> Score:
    """HealthBench and ResearchQA: share of pairs that are ordered as the reference scores (of an expert rubric) order them, and
    of those whose reference scores differ by `gap` or more. Ties are wrong; with ties as half a point beside it."""
    counts = [rl.pair_counts(judged.games[0], example.scores) for example, judged in rows]
    far = [rl.pair_counts(judged.games[0], example.scores, rule.gap) for example, judged in rows]
    top, bottom = [c.right for c in counts], [c.total for c in counts]
    total, failed, tied = sum(bottom), sum(c.failed for c in counts), sum(c.tied for c in counts)
    far_total = sum(c.total for c in far)
    parts: dict[str, float | None] = {
        f"accuracy_at_{rule.gap:g}": _share(sum(c.right for c in far), far_total) if far_total else None,
        f"pairs_at_{rule.gap:g}": float(far_total),
        "ties_as_half": _share(sum(top) + 0.5 * tied, total),
        f"ties_as_half_at_{rule.gap:g}": _share(sum(c.right + 0.5 * c.tied for c in far), far_total) if far_total else None,
        "pairs": float(total),
    }
    words = f"share of answer pairs ordered as the reference, ties wrong; at a reference gap of {rule.gap:g} beside it"
    strata = [Stratum("all", len(rows), ratio_of(top, bottom))]
    values = [c.right / c.total if c.total else NAN for c in counts]
    return _score(rule, words, strata, estimate(strata), (_share(tied, total - failed), _share(failed, total)), len(rows), parts,
                  by_subset(rows, values))  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ criteria


def score_criteria(rows: Rows, rule: Rule) -> Score:
    """InfoBench: share of the criteria on which the system agrees with the reference verdicts, over all criteria."""
    counts = [rl.criteria_counts(judged.games[0], example.met) for example, judged in rows]
    sizes = [len(example.met) for example, _ in rows]
    agreed = [a + (0.5 * t if rule.ties == "half" else 0.0) for a, t, _ in counts]
    tied, failed, total = sum(t for _, t, _ in counts), sum(f for *_, f in counts), sum(sizes)
    said = [(s > 0.5, m) for e, j in rows for s, m in zip(j.games[0], e.met) if s is not None and s != 0.5]
    scored = [([s for s in j.games[0] if s is not None], e.met) for e, j in rows]
    shares = [(float(np.mean(own)), float(np.mean(met))) for own, met in scored if own]
    parts = {
        "kappa": cohen_kappa([s for s, _ in said], [m for _, m in said]),
        "said_met": _mean([float(s) for s, _ in said]) if said else None,
        "reference_met": _share(sum(sum(e.met) for e, _ in rows), total),
        "answer_spearman": spearman([s for s, _ in shares], [m for _, m in shares]) if shares else None,
        "criteria": float(total),
    }
    strata = [Stratum("all", len(rows), ratio_of(agreed, sizes))]
    strict = _share(sum(a for a, _, _ in counts), total)
    words = "share of criteria with the reference's verdict; a score of exactly 1/2 is " + (
        "half a point" if rule.ties == "half" else "wrong"
    )
    values = [a / n for a, n in zip(agreed, sizes)]
    return _score(rule, words, strata, strict, (_share(tied, total - failed), _share(failed, total)), len(rows), parts,
                  by_subset(rows, values))  # fmt: skip
