"""RRD: what becomes of an item, batching over questions, whitened-uniform weights against scipy, and the folder of rubrics."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.linalg

from coevo_jax.errors import UserError
from coevo_jax.rubrics import rrd
from coevo_jax.rubrics.cache import RubricFolder, content_key
from coevo_jax.text.parse import Parsed
from coevo_jax.text.prompts import render_prompt

SAMPLES = [f"sample {i}" for i in range(8)]


class World:
    """Answers asks by rule. satisfied: item -> how many of the first samples satisfy it; strong, weak: items they satisfy."""

    def __init__(self, proposed, satisfied, children=None, strong=None, weak=(), overlapping=(), conflicting=(), unreadable=()):
        self.proposed, self.satisfied, self.children = proposed, satisfied, children or {}
        self.strong, self.weak = strong, weak
        self.overlapping, self.conflicting, self.unreadable = overlapping, conflicting, unreadable
        self.calls = []

    def ask(self, asks):
        self.calls.append([a.template for a in asks])
        for a in asks:
            render_prompt(a.template, **a.slots)  # every template exists and gets its slots
        return [a.read(self.text(a), False, False) for a in asks]

    def text(self, ask):
        s = ask.slots
        if ask.template == "rrd_propose":
            return json.dumps({"items": self.proposed})
        if ask.template == "rrd_split":
            return json.dumps({"items": self.children[s["item"]]})
        if ask.template == "criterion_yes_no":
            return "hm" if s["criterion"] in self.unreadable else "yes" if self.satisfies(s["criterion"], s["answer"]) else "no"
        listed = self.overlapping if ask.template == "rrd_overlap" else self.conflicting
        return "Yes." if s["item"] in listed else "There is no doubt: no"

    def satisfies(self, item, answer):
        if answer == "strong":
            return self.strong is None or item in self.strong
        return item in self.weak if answer == "weak" else int(answer.split()[1]) < self.satisfied[item]

    def refine(self, **limits):
        (out,) = rrd.run_all([rrd.refine("Q", SAMPLES, "strong", "weak", rrd.Limits(**limits))], self.ask)
        return out


def test_each_fate():
    world = World(
        ["a", "A.", "", "never", "weakly", "same", "against", "unread", "b"],
        {"a": 2, "never": 0, "weakly": 1, "same": 2, "against": 1, "unread": 1, "b": 1},
        strong=["a", "same", "against", "b", "unread"], weak=["weakly", "a"],
        overlapping=["same"], conflicting=["against"], unreadable=["unread"],
    )  # fmt: skip
    out = world.refine()
    assert out.items == ["a", "b"]
    assert out.counts == {
        "accepted": 2, "split": 0, "repeated": 2, "unsatisfied": 1, "misaligned": 1, "overlapping": 1, "conflicting": 1,
        "failed": 1,
    }  # fmt: skip
    assert out.votes.tolist() == [[float(i < 2), float(i < 1)] for i in range(8)]
    assert world.calls[1] == ["criterion_yes_no"] * 10 * 7  # the whole queue in one batch: 8 samples and two references


def test_what_most_satisfy_is_split_until_the_depth_is_reached():
    children = {"p": ["p1", "p2"], "p1": ["p11", "p12"], "p11": ["p111", "p112"]}
    satisfied = {"p": 8, "p1": 3, "p2": 2, "p11": 4, "p12": 1, "p111": 5, "p112": 1}
    out = World(["p"], satisfied, children).refine()
    assert out.items == ["p2", "p12", "p111", "p112"] and out.counts["split"] == 3  # p111 would be split but for its depth
    assert World(["p"], {"p": 2}, {}).refine().items == ["p"]  # the paper: more than 2
    ported = World(["p"], {"p": 2, "x": 1, "y": 1}, {"p": ["x", "y"]}).refine(more_than=1)
    assert ported.items == ["x", "y"]


def test_it_ends_after_so_many_rejections():
    names = [f"n{i}" for i in range(20)]
    out = World(names, dict.fromkeys(names, 0) | {"n19": 1}).refine(rejections=15)
    assert out.items == [] and out.counts["unsatisfied"] == 15 and out.detail


def test_a_proposal_that_does_not_read_is_no_rubric():
    world = World(["a"], {"a": 1})
    world.text = lambda ask: "no JSON"
    out = world.refine()
    assert out.items == [] and out.detail and rrd.rubric_of(out, []) is None


def test_questions_are_asked_together():
    worlds = {"Q0": World(["a"], {"a": 2}), "Q1": World(["p"], {"p": 8, "x": 1, "y": 1}, {"p": ["x", "y"]})}
    rounds = []

    def ask(asks):
        rounds.append([a.slots["question"] for a in asks])
        return [worlds[a.slots["question"]].ask([a])[0] for a in asks]

    out = rrd.run_all([rrd.refine(q, SAMPLES, "strong", "weak") for q in worlds], ask)
    assert [o.items for o in out] == [["a"], ["x", "y"]]
    assert rounds[0] == ["Q0", "Q1"] and rounds[1] == ["Q0"] * 10 + ["Q1"] * 10
    assert rrd.run_all([], ask) == []


def test_weights_of_a_model():
    refined = rrd.Refined(["a", "b"], np.zeros((8, 2)), {})

    def run(text):
        (found,) = rrd.run_all([rrd.ask_weights("Q", refined)], lambda asks: [asks[0].read(text, False, False)])
        render_prompt("rrd_weights", question="Q", items="1. a")
        return found

    assert run('{"weights": [30, 10]}').value.tolist() == [0.75, 0.25]
    for bad in ('{"weights": [30]}', '{"weights": [0, 0]}', '{"weights": [1, -1]}', '{"weights": [1, true]}', "30 10"):
        assert isinstance(run(bad), Parsed) and run(bad).status == "parse_fail"


# ---- weights


def by_scipy(X, shrink=0.1, ridge=1e-4):
    S = (1 - shrink) * X.T @ X / len(X) + (shrink + ridge) * np.eye(X.shape[1])
    w = np.real(scipy.linalg.fractional_matrix_power(S, -0.5)) @ np.ones(X.shape[1])
    w = np.maximum(w, 0)
    return w / w.sum()


@pytest.mark.parametrize("shape", [(8, 5), (8, 12), (2, 3)])
def test_whitened_uniform_weights(shape):
    X = np.random.default_rng(sum(shape)).integers(0, 2, shape).astype(float)
    found = rrd.whitened_uniform(X)
    assert found == pytest.approx(by_scipy(X)) and found.sum() == pytest.approx(1)
    assert rrd.whitened_uniform(X[:, ::-1]) == pytest.approx(found[::-1])


def test_items_of_equal_votes_share_their_weight():
    """Two equal columns and an orthogonal one, by hand: eigenvalues 0.1 + 0.9 * (1, 0, 0.5) + ridge."""
    X = np.asarray([[1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]], float)
    w = rrd.whitened_uniform(X)
    pair, single = (0.9 * 1.0 + 0.1 + 1e-4) ** -0.5, (0.9 * 0.5 + 0.1 + 1e-4) ** -0.5
    assert w == pytest.approx(np.asarray([pair, pair, single]) / (2 * pair + single))
    assert w[0] < w[2] < 2 * w[0]  # each of the two weighs less than the single one, together more
    raw = rrd.whitened_uniform(np.asarray([[1, 1], [1, 0], [1, 0], [1, 0]], float), shrink=0.0)
    assert raw[1] > raw[0]  # without shrinking, the rarely satisfied item weighs more


def test_weights_of_too_little_are_uniform():
    assert rrd.whitened_uniform(np.ones((1, 4))).tolist() == [0.25] * 4 and rrd.uniform(0).size == 0
    with pytest.raises(ValueError, match=r"\[N,M\]"):
        rrd.whitened_uniform(np.ones(3))


def test_a_rubric_of_weights():
    refined = rrd.Refined(["a", "b", "c"], np.zeros((8, 3)), {})
    rubric = rrd.rubric_of(refined, [0.5, 0.0, 0.5])
    assert [(c.text, c.weight) for c in rubric.criteria] == [("a", 0.5), ("c", 0.5)]


# ---- the folder


def test_a_rubric_is_kept_whole_or_not_at_all(tmp_path):
    folder = RubricFolder(tmp_path / "rubrics")
    key = content_key(question="Q", samples=SAMPLES)
    assert key == content_key(samples=SAMPLES, question="Q") != content_key(question="Q", samples=SAMPLES[:7])
    assert folder.get(key) is None
    folder.put(key, {"items": ["ä"], "weights": np.asarray([1.0])})
    assert RubricFolder(tmp_path / "rubrics").get(key) == {"items": ["ä"], "weights": [1.0]}
    assert [p.name for p in (tmp_path / "rubrics").iterdir()] == [f"{key}.json"]
    (tmp_path / "rubrics" / f"{key}.json").write_text('{"items": ["')  # a machine that died while writing
    assert folder.get(key) is None and folder.damaged == 1
    folder.put(key, {"items": ["b"]})
    assert folder.get(key) == {"items": ["b"]} and (folder.hits, folder.misses) == (1, 2)


def test_a_failed_write_leaves_nothing(tmp_path):
    folder = RubricFolder(tmp_path)
    with pytest.raises(TypeError):
        folder.put("k", {"x": object()})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="folder of rubrics"):
        RubricFolder(tmp_path / "file")
