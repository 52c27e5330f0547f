"""The modelled time of a step: each program's modelled seconds times how often it runs on a stated distribution of lengths.

It is a model: nothing was run. coevo_jax/cost says how a program's seconds come about. The sampler is played by the scheduler's
own rules (lengths.py), a host at a time; host time, admissions, moves and the reading of reports are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from coevo_jax.config.several import policy_names
from coevo_jax.cost import Cost, Kernel, Network, decode_kernels, mfu, program_cost, useful_update_flops
from coevo_jax.cost.operations import Kernels, splash
from coevo_jax.learn.packing import first_fit
from coevo_jax.learn.update import rows_devices
from coevo_jax.mesh import mesh_axes
from coevo_jax.models.attention import related_blocks, splash_block
from coevo_jax.plan import dynamic
from coevo_jax.plan.calls import Call, calls, has_steps
from coevo_jax.plan.cast import Slice
from coevo_jax.plan.compiled import Compiled, Program
from coevo_jax.plan.lengths import Drain, Lengths, drain_of, lognormal_lengths
from coevo_jax.plan.preference import on_pairs, passes

TEMPLATE = 200  # tokens that a prompt template adds


@dataclasses.dataclass(frozen=True)
class Workload:
    """Mean lengths in tokens before the cut at the config's limits: lognormal, sigma 1 of what is written, 0.5 of questions.
    criteria: a number of them."""

    question: float = 400
    answer: float = 3000
    rubric: float = 1500
    verdict: float = 800
    criteria: float = 5  # of a rubric, where a judge is asked about each alone
    seed: int = 0

    @property
    def text(self) -> str:
        return (
            f"lengths are assumed, not measured: lognormal, means {self.answer:g} an answer, {self.rubric:g} a rubric, "
            f"{self.verdict:g} a verdict (sigma 1) and {self.question:g} a question (sigma 0.5), cut at the config's limits; "
            f"seed {self.seed}"
        )


@dataclasses.dataclass(frozen=True)
class Figures:
    """A program's modelled cost on one device, at full depth; `runs` in a policy and in a rubric step."""

    name: str
    layers: int
    exact: bool
    peak_bytes: int
    flops: float
    bytes: float
    collective_bytes: dict[str, float]
    collective_seconds: float
    exposed_seconds: float
    crossing_bytes: float
    seconds: float
    in_place: bool
    warnings: int
    runs: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Step:
    """A policy step and a rubric step in seconds by part; `decode_collectives`: share of the decode time that is exposed."""

    parts: dict[str, tuple[float, float]]
    programs: dict[str, Figures]
    micro_batches: tuple[int, int]
    mfu: float  # of the update
    mfu_step: float  # useful FLOPs of the update over the whole step
    sampled_tokens: tuple[float, float]
    trained_tokens: tuple[float, float]
    decode_collectives: float
    rows_running: dict[str, float]

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a policy step and of a rubric step."""
        return sum(p for p, _ in self.parts.values()), sum(r for _, r in self.parts.values())


# ----------------------------------------------------------------------------------------------------------------- lengths


def text_lengths(s: Slice, work: Workload, kind: str, count: int, judge: str = "judge") -> Lengths:
    """Prompts and completions of `count` texts of a kind: answer, rubric, question or verdict (of the judge of that name)."""
    cfg = s.cfg
    if kind in ("judgement", "items"):
        return dynamic.judged(cfg, work.seed, count, work.question, work.answer, TEMPLATE, kind == "items")
    seat = s.judges[judge].cfg if judge in s.judges else cfg.judge
    most, new = {
        "answer": (cfg.sampler.max_prompt, cfg.answer.max_new_tokens),
        "rubric": (cfg.sampler.max_prompt, cfg.rubric_sampling.max_new_tokens),
        "question": (cfg.sampler.max_prompt, cfg.question_sampling.max_new_tokens),
        "verdict": (seat.max_prompt or cfg.sampler.max_prompt, seat.sampling.max_new_tokens),
    }[kind]
    prompt = {
        "answer": work.question,
        "rubric": work.question + TEMPLATE + (work.answer if cfg.schedule.mode == "rlcer" else 0),
        "question": work.answer + TEMPLATE,
        "verdict": work.question + TEMPLATE + work.answer + (work.rubric if cfg.rubric.source != "none" else 0),
    }[kind]
    if cfg.schedule.mode == "dynamic" and kind == "rubric":
        prompt = dynamic.rubric_prompt(cfg, work.question, work.answer, TEMPLATE)
    return lognormal_lengths(count, work.seed, most, new, getattr(work, kind), prompt)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows of an update. visited: share of the causal blocks of splash attention that hold a pair of one segment."""

    micro_batches: int
    tokens: list[int]  # of each sample
    visited: float


def packed_rows(s: Slice, lengths: Lengths) -> Rows:
    """The rows that these samples fill, by the run's own packing."""
    u = s.cfg.update
    tokens = np.minimum(lengths.prompts + lengths.completions, u.pack_length).tolist()
    rows = first_fit(tokens, u.pack_length, u.max_segments)
    devices = rows_devices(s.mesh, s.rules)
    height = -(-u.rows_per_micro // devices) * devices
    micro = -(-len(rows) // height)
    sizes = [[tokens[i] for i in members] for members in rows]
    chips = math.prod(s.mesh.shape[axis] for axis in mesh_axes(s.rules.time))
    return Rows(micro, tokens, visited_share(sizes, micro * height, u.pack_length, chips))


def visited_share(sizes: list[list[int]], rows: int, length: int, chips: int = 1) -> float:
    """Of all causal blocks of splash attention over `rows` rows of so many tokens, the share that hold a pair of one segment.
    sizes: segments of each row; further rows are empty. Where several chips share a row's time, all take as long as the one with
    the most blocks."""
    if length % (128 * chips):  # which the kernel can't run
        return 1.0
    block = splash_block(length // chips)
    visited = 0
    for own in [*sizes, *([[]] * (rows - len(sizes)))]:
        ids = np.zeros(length, np.int32)
        ids[: sum(own)] = np.repeat(np.arange(1, len(own) + 1), own)
        of_chip = np.tril(related_blocks(ids, block)).reshape(-1, chips, length // block).sum(axis=(0, 2))
        visited += chips * int(of_chip.max())
    blocks = length // block
    return visited / (rows * blocks * (blocks + 1) / 2)


def splash_kernels(visited: float) -> Kernels:
    """Costs of splash attention over packed rows, of whose causal blocks a share is visited (models/attention.py)."""

    def cost(kernel: Kernel) -> tuple[float, float] | None:
        found = splash(kernel)
        return found and (found[0] * visited, found[1] * visited)

    return cost


# ------------------------------------------------------------------------------------------------------------------- costs


def costs(program: Program, s: Slice, trips: Any = None, kernels: Any = None) -> dict[str, Any]:
    """A program's cost as a dict, on the line through its compiled depths."""

    @functools.cache
    def at(part: Compiled) -> Cost:
        from coevo_jax import aot

        network = Network.of(list(s.mesh.devices.flat), s.topology.chip)
        return program_cost(part.read(), s.topology.chip, aot.hosts_of(s.mesh), network=network, trips=trips, kernels=kernels)

    names = ("flops", "bytes", "collective_seconds", "exposed_seconds", "crossing_bytes", "seconds")
    out: dict[str, Any] = {n: program.line(lambda c, n=n: getattr(at(c), n)) for n in names}  # type: ignore[misc]
    kinds = sorted({k for part in program.parts for k in at(part).collective_bytes})
    out["collective_bytes"] = {k: program.line(lambda c, k=k: at(c).collective_bytes.get(k, 0.0)) for k in kinds}  # type: ignore[misc]
    return out


def figures_of(
    program: Program, s: Slice, trips: Any = None, kernels: Any = None, runs: tuple[float, float] = (0.0, 0.0)
) -> Figures:
    """Memory and cost of a program in one record."""
    return Figures(
        program.name, program.layers, program.exact, program.memory.peak, in_place=program.in_place,
        warnings=len(program.warnings), runs=runs, **costs(program, s, trips, kernels),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------------- step


def model_step(s: Slice, compiled: dict[str, Program], work: Workload) -> Step:
    """The whole step. Programs that were not compiled are left out."""
    cfg = s.cfg
    figures: dict[str, Figures] = {}
    parts: dict[str, tuple[float, float]] = {}
    sampled = [0.0, 0.0]
    running: dict[str, float] = {}
    packed = trained_rows(s, work)
    micro = packed[0].micro_batches, packed[1].micro_batches
    for name, program in compiled.items():
        role, kind = name.split(" ", 1)
        if kind in ("prefill", "decode", "scoring") or role.startswith("policy_"):
            continue
        runs = passes(cfg, kind)
        if kind == "publish":
            figures[name] = figures_of(program, s, runs=(1, 1))
            seconds = figures[name].seconds, figures[name].seconds
        else:
            both = [figures_of(program, s, (r.micro_batches,), splash_kernels(r.visited), (runs, runs)) for r in packed]
            figures[name] = both[0]
            seconds = both[0].seconds * runs, both[1].seconds * runs
        parts[name] = in_steps(s, role, seconds)
    decode_seconds = exposed = 0.0
    for call in calls(s, work.criteria):
        found = _sample(s, compiled, call, work, figures)
        parts |= found["parts"]
        for i in (0, 1):
            sampled[i] += found["tokens"][i]
        running |= found["running"]
        decode_seconds, exposed = decode_seconds + found["decode"], exposed + found["exposed"]
    trained = tuple(float(sum(rows.tokens)) * on for rows, on in zip(packed, has_steps(cfg)))
    update = next((f for name, f in figures.items() if name.endswith("update")), None)
    useful = useful_update_flops(s.policy, packed[0].tokens, frozen=cfg.lora.rank > 0)
    whole = sum(p for p, _ in parts.values())
    chip = s.topology.chip
    return Step(
        parts, figures, micro,
        mfu(useful, update.seconds, s.chips, chip.bf16_flops) if update else 0.0,
        mfu(useful, whole, s.chips, chip.bf16_flops) if update and whole else 0.0,
        (sampled[0], sampled[1]), (trained[0], trained[1]), exposed / decode_seconds if decode_seconds else 0.0, running,
    )  # fmt: skip


def _sample(s: Slice, compiled: dict[str, Program], call: Call, work: Workload, figures: dict[str, Figures]) -> dict[str, Any]:
    """Prefill and decode of one kind of text, for both steps."""
    _, engine = s.player(call.role)
    out: dict[str, Any] = {"parts": {}, "tokens": [0.0, 0.0], "running": {}, "decode": 0.0, "exposed": 0.0}
    prefill = compiled.get(f"{call.role} prefill") or compiled.get(f"{call.role} scoring")
    seconds = [0.0, 0.0], [0.0, 0.0]
    for i, (count, prompts) in enumerate(zip(call.counts, call.prompts)):
        if not count:
            continue
        kind = "items" if call.kind == "judgement" and i else call.kind  # of all rubrics of a prompt
        lengths = text_lengths(s, work, kind, count, call.role)
        out["tokens"][i] = float(lengths.completions.sum())
        if prefill is not None:
            hosts = math.prod(s.mesh.shape[axis] for axis in ("data", "fsdp"))
            ran, visited = prefilled(lengths.prompts[: -(-prompts // hosts)], engine)
            cost = costs(prefill, s, kernels=splash_kernels(visited))
            _add(figures, prefill, s, i, ran, cost)
            seconds[0][i] = ran * cost["seconds"]
        decode = compiled.get(f"{call.role} decode")
        if decode is None:
            continue
        drain = drain_on_host(s, engine, lengths, count)
        cost = costs(decode, s, trips=(engine.cfg.steps_per_dispatch,), kernels=decode_kernels(drain.read))
        _add(figures, decode, s, i, drain.dispatches, cost)
        seconds[1][i] = drain.dispatches * cost["seconds"]
        out["decode"] += drain.dispatches * cost["seconds"]
        out["exposed"] += drain.dispatches * cost["exposed_seconds"]
        if i == 0:
            out["running"][call.title] = drain.rows
    for name, part in zip(("prefill", "decode"), seconds):
        if any(part):
            out["parts"][f"{call.title}: {name}"] = (part[0], part[1])
    return out


def prefilled(prompts: np.ndarray, engine: Any) -> tuple[int, float]:
    """Runs of the largest prefill that one host's prompts take, in order, and the share of its rows' causal blocks that splash
    visits. A process prefills what its own slots need."""
    height, length = engine.variants[-1].shape
    rows: list[list[int]] = [[]]
    for n in prompts.tolist():
        if sum(rows[-1]) + n > length:
            rows.append([])
        rows[-1].append(n)
    runs = -(-len(rows) // height)
    return runs, visited_share(rows, runs * height, length)


def drain_on_host(s: Slice, engine: Any, lengths: Lengths, count: int) -> Drain:
    """A host's share of the rows through its share of the slots: of the host that takes longest, since all wait for it."""
    hosts = math.prod(s.mesh.shape[axis] for axis in ("data", "fsdp"))
    classes = tuple((n // hosts, size) for n, size in engine.classes)
    own = -(-count // hosts)
    parts = [slice(i, i + own) for i in range(0, count, own)]
    shares = [Lengths(lengths.prompts[part], lengths.completions[part], lengths.text) for part in parts]
    drains = [drain_of(classes, x, len(x.prompts), engine.cfg.steps_per_dispatch, engine.cfg.read_lag) for x in shares]
    return max(drains, key=lambda drain: drain.dispatches)


def _add(figures: dict[str, Figures], program: Program, s: Slice, i: int, runs: float, cost: Any = None) -> Figures:
    """Count runs of a program in step i; its cost is that of its first use."""
    if program.name not in figures:
        figures[program.name] = Figures(
            program.name, program.layers, program.exact, program.memory.peak, in_place=program.in_place,
            warnings=len(program.warnings), **(cost or costs(program, s)),
        )  # fmt: skip
    before = figures[program.name].runs
    after = (before[0] + runs, before[1]) if i == 0 else (before[0], before[1] + runs)
    figures[program.name] = dataclasses.replace(figures[program.name], runs=after)
    return figures[program.name]


def trained_rows(s: Slice, work: Workload) -> tuple[Rows, Rows]:
    """Packed rows of a policy update and of a rubric update (reward models: of pairs of conversations, twice)."""
    count = 2 * s.cfg.reward.pairs if s.cfg.schedule.mode == "reward" else s.cfg.schedule.prompts * s.cfg.schedule.group
    count = 2 * s.cfg.dpo.pairs if on_pairs(s.cfg) else count
    answers = packed_rows(s, text_lengths(s, work, "answer", count))
    rubrics = dynamic.counts(s.cfg)["rubric"][1] if s.cfg.schedule.mode == "dynamic" else count
    return answers, packed_rows(s, text_lengths(s, work, "rubric", rubrics)) if s.samples else answers


def in_steps(s: Slice, role: str, seconds: tuple[float, float]) -> tuple[float, float]:
    """A role's update in a policy step and in a rubric step. Weights that two roles share, or whose program they share, are
    trained in both; evolving RLCER trains its writer in the policy's step."""
    mode, evolving = s.cfg.schedule.mode, s.cfg.schedule.order == "alternate"
    own = role.removeprefix("critic_")
    if mode == "rlcer":
        answers, rubrics = (own == "policy") * seconds[0], evolving * (own == "rubric" or "rubric" not in s.trained) * seconds[1]
        return answers + rubrics, 0.0
    policy, rubric = has_steps(s.cfg)
    apart = s.generator is not None and s.owner("rubric") == "rubric"
    return policy * (own != "rubric") * seconds[0], rubric * (own == "rubric" or not apart) * seconds[1]


def chip_hours(s: Slice, step: Step) -> float:
    """Of the config's run: its cycles of policy and rubric updates. Evaluation, checkpoints and dropped groups are left out."""
    policy, rubric = step.seconds
    if s.cfg.schedule.mode == "dynamic":
        return sum(n * seconds for n, seconds in zip(dynamic.updates(s.cfg), step.seconds)) * s.chips / 3600
    return s.cfg.schedule.cycles * s.cfg.schedule.k * (policy * len(policy_names(s.cfg)) + rubric) * s.chips / 3600
