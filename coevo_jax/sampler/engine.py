"""The engine: one decoder for every role. Device work is pure jitted programs over a donated state; Python holds a queue.

    engine = Engine(spec, cfg.sampler, stop_ids, seed=run_seed)
    engine.warmup(params)
    completions = engine.generate(params, requests)      # [request][sample]

Weights are arguments, so one engine serves several weight sets of one architecture and never holds stale ones: keys, values
and the per-layer copies of the weights live as long as one call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax.config import SamplerConfig
from coevo_jax.errors import UserError
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler import decode, kv, prefill, scoring
from coevo_jax.sampler import state as st
from coevo_jax.sampler.programs import Compiling, Programs, signature
from coevo_jax.sampler.requests import Completion, Request, check_prompt, check_request
from coevo_jax.sampler.run import Progress, Run
from coevo_jax.sampler.stats import Stats
from coevo_jax.sampler.tree import Tree, flat, plan

Params = dict[str, Any]
Forms = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Weights:
    """One set of weights for the length of a call: stacked as they came (prefill), and one tree a layer (decode)."""

    stacked: Params
    split: Params
    signature: int  # tells which programs serve them
    dtype: Any  # of the computation


class Engine:
    """Slots, programs and counters for one architecture. `stats` counts since its last reset."""

    def __init__(self, spec: ModelSpec, cfg: SamplerConfig, stop_ids: Sequence[int], mesh: Mesh | None = None, seed: int = 0):
        self.spec, self.cfg, self.mesh, self.seed = spec, cfg, mesh, seed
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.kv_dtype = kv.DTYPES[cfg.kv_dtype]
        self.head_width = prefill.round_up(cfg.max_prompt, prefill.BLOCK)
        self.positions = prefill.round_up(cfg.max_prompt + cfg.max_new, 32)
        self.classes = self._classes()
        # XLA copies the part of the cache that a shorter reach cuts out, so above about half of it all is read sooner
        self.reaches = sorted({min(prefill.round_up(self.positions // 3, 32), self.positions), self.positions})
        self.segment = kv.segment_for(self.classes[-1][1]) if cfg.attention == "xla" and self._platform == "cpu" else 0
        self.rows = self._shards()
        self.kinds, self.class_rows = st.places_of(self.classes, self.rows)
        self.window = 0 if cfg.attention == "xla" else prefill.round_up(cfg.steps_per_dispatch, cfg.check_every)
        if self.window or self.segment:  # which read what is filled alone
            self.reaches = [self.positions]
        packed = {"pallas": "splash", "pallas_interpret": "splash_interpret"}.get(cfg.attention, "xla")
        packed = "blocks" if packed == "xla" and self._one_cpu else packed
        heads = self.head_width if cfg.share_heads else 0
        most = max(1, cfg.prefill_tokens // prefill.round_up(cfg.max_prompt, prefill.BLOCK))
        # Each host computes all rows of a prefill: more hosts must not mean more rows than the budget has
        self.variants = prefill.variants(cfg.max_prompt, cfg.prefill_tokens, min(self.rows, most), heads, packed)
        self.next_variants = prefill.variants(cfg.max_prompt, cfg.prefill_tokens, self.rows, heads, packed)
        longest = cfg.max_prompt + cfg.max_new
        self.score_variants = prefill.variants(longest, cfg.prefill_tokens, self.rows, heads, packed)
        self.least = cfg.share_least if cfg.share_heads else 0
        self.deepest = min(cfg.heads, 3)
        self.refill_at = max(1, math.ceil(cfg.refill_free_share * cfg.slots))  # free slots worth ending a dispatch for
        self.collect_size = min(cfg.slots, 32)
        self.programs = Programs()
        self.stats = Stats()

    # ---- what a caller uses --------------------------------------------------------------------------------------------

    def warmup(
        self,
        params: Params,
        *,
        top_p: bool = False,
        next_token: bool = True,
        score: bool = False,
        guided: bool = False,
        whole: bool = False,
        progress: Compiling | None = None,
    ) -> float:
        """Compile every program ahead, for weights like `params`; a compile after this is an error. Returns seconds.

        top_p: also the variants for truncated support; guided: those for grammars; next_token, score: those of the two scoring
        calls; whole: next_token_probs of every token of the vocabulary at once. May be called again for weights of another dtype
        or sharding.
        """
        start, self.programs.sealed = time.perf_counter(), False
        weights, nothing = self.prepare(params), self._nothing()
        with self.programs.ahead(progress):
            self._ask_for_all(weights, nothing, top_p, next_token, score, guided, whole)
        self.stats.reset()
        self.programs.sealed = True
        return time.perf_counter() - start

    def generate(self, params: Params, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Completion]]:
        """Completions of each request, n samples in order. progress(done, total) counts completions, once a dispatch.

        UserError: an empty or too long prompt, or a sampling value out of range. Interrupting it leaves nothing behind.
        """
        start = time.perf_counter()
        requests = [check_request(r, self.cfg, self.spec.vocab_size) for r in requests]
        if not requests:
            return []
        out = Run(self, params, requests, progress)()
        self.stats.seconds += time.perf_counter() - start
        return out

    def next_token_probs(self, params: Params, prompts: Sequence[Sequence[int] | np.ndarray], forms: Forms) -> np.ndarray:
        """Probability that the next token is one of each form's ids, [prompts, forms] float32.

        Equal prompts run once, and prompts that begin alike share their beginning (tree.py).
        """
        start = time.perf_counter()
        limit, vocab = self.cfg.max_prompt, self.spec.vocab_size
        ids = [check_prompt(p, limit, vocab, f"prompt {i} of next_token_probs") for i, p in enumerate(prompts)]
        for f, form in enumerate(forms):
            check_prompt(form, vocab, vocab, f"form {f} of next_token_probs")
        table, columns = scoring.id_table(forms)
        todo, which = scoring.distinct(ids)
        weights = self.prepare(params, decodes=False)
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(todo)

        def run(packed: prefill.Packed, members: list[int], store: kv.KV | None) -> None:
            for i, row in zip(members, self._next_token(weights, packed, [len(todo[i]) for i in members], table, store)):
                found[i] = np.asarray([row[c].sum() for c in columns], np.float32)

        scoring.walk(self, weights, todo, self._tree(todo, [len(t) - 1 for t in todo]), self.next_variants, run)
        self.stats.seconds += time.perf_counter() - start
        return np.stack([found[i] for i in which]) if ids else np.zeros((0, len(forms)), np.float32)

    def score(
        self,
        params: Params,
        prompts: Sequence[Sequence[int] | np.ndarray],
        continuations: Sequence[Sequence[int] | np.ndarray],
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> list[np.ndarray]:
        """Log-prob of each token of each continuation given its prompt and what precedes it, float32, in nats. greedy: [2,n]
        each, at temperature 1, the second row 1 where the token is the likeliest one."""
        start = time.perf_counter()
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts for {len(continuations)} continuations")
        limit, vocab = self.cfg.max_prompt + self.cfg.max_new, self.spec.vocab_size
        heads = [check_prompt(p, limit, vocab, f"prompt {i} of score") for i, p in enumerate(prompts)]
        whole = [np.concatenate([h, np.asarray(c, np.int32)]) for h, c in zip(heads, continuations)]
        whole = [check_prompt(w, limit, vocab, f"prompt and continuation {i} of score") for i, w in enumerate(whole)]
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(whole)
        weights = self.prepare(params, decodes=False)
        tree = self._tree(whole, [min(len(h) - 1, self.head_width) for h in heads])

        def run(packed: prefill.Packed, members: list[int], store: kv.KV | None) -> None:
            logp = self._score(weights, packed, temperature, store, greedy)
            for i, (row, at) in zip(members, packed.places):
                first = at + len(heads[i]) - 1 - tree.start(i)  # the position that predicts the continuation's first token
                found[i] = logp[..., row, first : first + len(whole[i]) - len(heads[i])].copy()

        scoring.walk(self, weights, whole, tree, self.score_variants, run)
        self.stats.seconds += time.perf_counter() - start
        return found

    def _tree(self, sequences: list[np.ndarray], limits: list[int]) -> Tree:
        return plan(sequences, limits, self.least, self.deepest) if self.least else flat(len(sequences))

    # ---- shapes --------------------------------------------------------------------------------------------------------

    def _classes(self) -> tuple[tuple[int, int], ...]:
        """(slots, positions) of each class, shortest first; the longest must hold any row that may come."""
        cfg = self.cfg
        if cfg.narrow and (cfg.length_classes or not all(0 < n < cfg.slots for n in cfg.narrow)):
            raise UserError(f"sampler.narrow = {cfg.narrow}", where="sampler.narrow",
                            expected=f"numbers of slots below sampler.slots = {cfg.slots}, and no length classes")  # fmt: skip
        if cfg.narrow and self._shards_of_mesh() > 1:
            raise UserError(f"sampler.narrow = {cfg.narrow}", where="sampler.narrow",
                            expected="() where slots are dealt to several devices")  # fmt: skip
        if cfg.attention == "pallas" and self._platform != "tpu":
            raise UserError(f"the decode kernel can't run on {self._platform}", where="sampler.attention", expected="xla")
        if cfg.attention != "xla" and cfg.narrow:
            raise UserError(f"sampler.narrow = {cfg.narrow}", where="sampler.narrow",
                            expected="() with sampler.attention=pallas, for which slots at rest cost nothing")  # fmt: skip
        if not cfg.length_classes:
            return ((cfg.slots, self.positions),)
        classes = tuple(sorted(((int(n), int(s)) for n, s in cfg.length_classes), key=lambda c: c[1]))
        if sum(n for n, _ in classes) != cfg.slots or any(n < 1 for n, _ in classes):
            raise UserError(f"the classes hold {sum(n for n, _ in classes)} slots", where="sampler.length_classes",
                            expected=f"sampler.slots = {cfg.slots} in all, at least 1 each")  # fmt: skip
        if classes[-1][1] < cfg.max_prompt + cfg.max_new or classes[0][1] < 2:
            raise UserError(f"the longest class has {classes[-1][1]} positions", where="sampler.length_classes",
                            expected=f"at least max_prompt + max_new = {cfg.max_prompt + cfg.max_new}")  # fmt: skip
        return classes

    @property
    def _one_cpu(self) -> bool:
        return self._platform == "cpu" and (self.mesh is None or self.mesh.size == 1)

    @property
    def _platform(self) -> str:
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform

    def kind_of(self, slot: int) -> int:
        """Class of a slot."""
        return int(self.kinds[slot])

    def plan(self, reach: int, shared: bool, truncated: bool, forced: bool, guided: bool, narrow: int = 0) -> decode.Plan:
        """A decode program's plan; guided ones take one step. narrow: for a state of so few slots (0: of all)."""
        every, window = (1, min(1, self.window)) if guided else (self.cfg.check_every, self.window)
        width, attention = self.head_width if shared else 0, self.cfg.attention
        classes = ((narrow, self.positions),) if narrow else self.classes
        return decode.Plan(classes, reach, width, truncated, forced, every, attention, window, self._one_cpu)

    def reach_for(self, needed: int) -> int:
        """The shortest compiled reach that holds so many positions."""
        return next((r for r in self.reaches if r >= needed), self.reaches[-1])

    def narrow_reach(self, slots: int) -> int:
        """Narrow programs come with one reach: few rows cost little at any."""
        return self.reaches[-1]

    # ---- compiled programs ---------------------------------------------------------------------------------------------

    def _ask_for_all(
        self, weights: Weights, nothing: kv.KV, top_p: bool, next_token: bool, score: bool, guided: bool, whole: bool
    ) -> None:
        """Ask for every program once, as calls will; inside `Programs.ahead`, so that nothing runs."""
        cfg, one = self.cfg, np.zeros(1, np.int32)
        state = self.new_state()
        store = self.new_store() if cfg.share_heads or cfg.share_decode else None
        store_of = lambda variant: store if variant.context else None  # noqa: E731
        truncated = (False, True) if top_p else (False,)
        forced = (False, True) if cfg.forced_tokens else (False,)
        choices = list(itertools.product(truncated, (False, True) if guided else (False,), forced))
        shared, narrower = store if cfg.share_decode else None, state
        for slots in [0, *sorted(set(cfg.narrow), reverse=True)]:  # the slowest come first
            narrower = self.run_narrow(narrower, slots) if slots else state
            mask = np.zeros((slots or cfg.slots, -(-self.spec.vocab_size // 32)), np.uint32)
            for reach in [self.narrow_reach(slots)] if slots else self.reaches:
                for cut, masked, force in choices:
                    plan = self.plan(reach, cfg.share_decode, cut, force, masked, slots)
                    self.run_decode(weights, narrower, shared, mask if masked else None, plan, 0, 0)
            self.run_collect(narrower, np.zeros(self.collect_size, np.int32))
        for v in self.variants:
            buffer = self.run_prefill(weights, prefill.pack([prefill.Span(one)], v), store_of(v))
            self._ask_for_small(state, store, buffer, nothing)
        tables = [[[0]]] if next_token else []
        tables += [[[i] for i in range(self.spec.vocab_size)]] if whole else []
        for v, forms in itertools.product(self.next_variants, tables):
            self._next_token(weights, prefill.pack([prefill.Span(one)], v), [1], scoring.id_table(forms)[0], store_of(v))
        for v in self.score_variants if score else ():
            self._score(weights, prefill.pack([prefill.Span(one)], v), 1.0, store_of(v))

    def _ask_for_small(self, state: st.State, store: kv.KV | None, buffer: kv.KV, nothing: kv.KV) -> None:
        """The programs that follow a prefill."""
        admission = st.Admission(*(np.int32(0), *self._no_admission()))
        if store is not None:
            self.run_keep(store, buffer, 0, 0, 0, 0, 0)
        for kind in range(len(self.classes)):
            for source in [None] if self.cfg.share_decode or store is None else [None, store]:
                self.run_admit(state, buffer, source, admission, kind)
            if self.cfg.share_decode:
                self.run_admit(state, nothing, None, admission, kind)
            for to in range(kind + 1, len(self.classes)):
                one, other = (int(np.flatnonzero(self.kinds == c)[0]) for c in (kind, to))
                self.run_move(state, one, other, (kind, to))

    def prepare(self, params: Params, decodes: bool = True) -> Weights:
        """Weights for the programs; the dtype of the final norm is that of the computation (matrices may be quantised)."""
        dtype, name = params["final_norm"].dtype, signature(params)
        if not decodes:
            return Weights(params, {}, name, dtype)
        function = functools.partial(decode.split_layers, dtype=dtype)
        split = self.programs.get(("weights", name), function, (params["layers"],))
        return Weights(params, {**params, "layers": split(params["layers"])}, name, dtype)

    def new_state(self) -> st.State:
        """All slots free."""
        make = functools.partial(st.new_state, self.spec, self.classes, self.cfg.max_new, self.kv_dtype, self.segment)
        return self.programs.get(("state",), make, (), out_shardings=self._state_sharding())()

    def new_store(self) -> kv.KV:
        """An empty store of shared heads, stacked."""
        make = functools.partial(kv.empty, (self.spec.layers, self.cfg.heads), self.spec, self.head_width, self.kv_dtype)
        return self.programs.get(("store",), make, (), out_shardings=self._sharding(None, None, "tensor"))()

    def _nothing(self) -> kv.KV:
        """A packed row without a prompt."""
        make = functools.partial(kv.empty, (self.spec.layers, 1), self.spec, prefill.BLOCK, self.kv_dtype)
        return self.programs.get(("nothing",), make, ())()

    def run_prefill(self, weights: Weights, packed: prefill.Packed, store: kv.KV | None) -> kv.KV:
        """Keys and values of packed spans, stacked."""
        start = time.perf_counter()
        store = store if packed.variant.context else None
        function = functools.partial(
            prefill.prefill, spec=self.spec, variant=packed.variant, dtype=weights.dtype, kv_dtype=self.kv_dtype, mesh=self.mesh
        )
        args = (weights.stacked, *packed.arrays, store)
        key = ("prefill", packed.variant, weights.signature)
        out = self.programs.get(key, function, args, out_shardings=self._sharding(None, None, "tensor"))(*args)
        jax.block_until_ready(out) if not self.cfg.read_lag else None
        self._count_prefill(packed, start)
        return out

    def run_keep(self, store: kv.KV, buffer: kv.KV, row: int, parent: int, length: int, packed_row: int, offset: int) -> kv.KV:
        """A store with a head in its row."""
        self.stats.heads_kept += 1
        args = (store, buffer, *(np.int32(x) for x in (row, parent, length, packed_row, offset)))
        key = ("keep", buffer.keys.shape)
        return self.programs.get(key, st.keep, args, donate_argnums=0, out_shardings=self._sharding(None, None, "tensor"))(*args)

    def run_admit(
        self, state: st.State, buffer: kv.KV | None, store: kv.KV | None, admission: st.Admission, kind: int
    ) -> st.State:
        """A state in which the admission's slots, all of class `kind`, have begun."""
        buffer = self._nothing() if buffer is None else buffer  # prompts that are all head
        function = functools.partial(st.admit, kind=kind, rows=self.class_rows, width=self.head_width, copy=store is not None)
        args, key = (state, buffer, store, admission), ("admit", kind, buffer.keys.shape, store is not None)
        return self.programs.get(key, function, args, donate_argnums=0, out_shardings=self._state_sharding())(*args)

    def run_move(self, state: st.State, source: int, target: int, kinds: tuple[int, int]) -> st.State:
        """A state in which one row goes on in a slot of a larger class."""
        function = functools.partial(st.move, kinds=kinds, rows=self.class_rows)
        args = (state, np.int32(source), np.int32(target))
        return self.programs.get(("move", kinds), function, args, donate_argnums=0, out_shardings=self._state_sharding())(*args)

    def run_narrow(self, state: st.State, width: int, rows: Sequence[int] = ()) -> st.State:
        """A state of the `width` slots `rows`, in this order; the old one is used up. One layer a call, so that the two are not
        in memory together."""
        index, before = np.zeros(width, np.int32), state.rows.active.shape[0]
        index[: len(rows)] = rows

        def take(name: str, tree: Any, sharding: Any) -> Any:
            out = self.programs.get(("narrow", name, before, width), st.take_rows, (tree, index), out_shardings=sharding)(
                tree, index
            )
            for x in jax.tree.leaves(tree):
                x.delete() if isinstance(x, jax.Array) else None
            return out

        own = tuple(take("layer", layer, self._sharding(None, "tensor")) for layer in state.own)
        return st.State(own, *take("rest", (state.rows, state.drawings), self._sharding(None)))

    def run_collect(self, state: st.State, slots: np.ndarray) -> st.Drawings:
        """What slots have drawn, as copies."""
        args = (state.drawings, slots)
        return self.programs.get(("collect", state.rows.active.shape[0], len(slots)), st.take_rows, args)(*args)

    def run_decode(
        self,
        weights: Weights,
        state: st.State,
        store: kv.KV | None,
        mask: np.ndarray | None,
        p: decode.Plan,
        steps: int,
        leave_at: int,
    ) -> tuple[st.State, st.Report]:
        """One dispatch."""
        function = functools.partial(
            decode.decode, spec=self.spec, stop_ids=self.stop_ids, plan=p, dtype=weights.dtype, mesh=self.mesh
        )
        args = (weights.split, state, store, mask, np.int32(steps), np.int32(leave_at))
        key = ("decode", p, store is not None, "guided" if mask is not None else "free", weights.signature)
        sharding = None if self.mesh is None else (self._state_sharding(), None)
        return self.programs.get(key, function, args, donate_argnums=1, out_shardings=sharding)(*args)

    def _next_token(
        self, weights: Weights, packed: prefill.Packed, lengths: list[int], table: np.ndarray, store: kv.KV | None
    ) -> np.ndarray:
        start = time.perf_counter()
        last = np.zeros(scoring.most_sequences(packed.variant), np.int32)
        T = packed.variant.shape[1]
        for i, (row, at) in enumerate(packed.places):
            block = at // prefill.BLOCK
            last[i] = row * T + at + lengths[i] - int(packed.head_lengths[row, block]) - 1
        function = functools.partial(
            scoring.next_token_program, spec=self.spec, variant=packed.variant, dtype=weights.dtype, mesh=self.mesh
        )
        args = (weights.stacked, last, table, *packed.arrays, store if packed.variant.context else None)
        key = ("next token", packed.variant, len(table), weights.signature)
        probs = _fetch(self.programs.get(key, function, args)(*args))[: len(packed.places)]
        self._count_prefill(packed, start)
        return probs

    def _score(
        self, weights: Weights, packed: prefill.Packed, temperature: float, store: kv.KV | None, greedy: bool = False
    ) -> np.ndarray:
        start = time.perf_counter()
        how = {"spec": self.spec, "variant": packed.variant, "dtype": weights.dtype, "mesh": self.mesh, "greedy": greedy}
        function = functools.partial(scoring.score_program, **how)
        targets = scoring.shifted_targets(packed.tokens)
        args = (weights.stacked, targets, np.float32(temperature), *packed.arrays, store if packed.variant.context else None)
        key = ("score greedy" if greedy else "score", packed.variant, weights.signature)
        logp = _fetch(self.programs.get(key, function, args)(*args))
        self._count_prefill(packed, start)
        return logp

    def _count_prefill(self, packed: prefill.Packed, start: float) -> None:
        self.stats.prefill_tokens += packed.used
        self.stats.prefill_positions += packed.tokens.size
        self.stats.prefill_seconds += time.perf_counter() - start

    def _no_admission(self) -> tuple[Any, ...]:
        zeros = np.zeros(self.cfg.slots, np.int32)
        forced = np.full((self.cfg.slots, self.cfg.forced_tokens), st.FREE, np.int32)
        return zeros, zeros, zeros, zeros, zeros, forced, st.new_rows(self.cfg.slots)

    # ---- mesh ----------------------------------------------------------------------------------------------------------

    def _shards_of_mesh(self) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape.get(axis, 1) for axis in ("data", "fsdp"))

    def _shards(self) -> int:
        """Devices that slots and packed rows are dealt to."""
        shards = self._shards_of_mesh()
        for n, _ in self.classes:
            if n % shards:
                raise UserError(f"sampler.slots: {n} slots of a class do not divide over {shards} devices", where="sampler.slots",
                                expected=f"a multiple of {shards}", nearest=str(prefill.round_up(n, shards)))  # fmt: skip
        return shards

    def _sharding(self, *axes: Any) -> NamedSharding | None:
        """Of keys and values: kv heads over 'tensor' where they divide; None without a mesh."""
        if self.mesh is None:
            return None
        tensor = self.mesh.shape.get("tensor", 1)
        fits = [None if a == "tensor" and (tensor == 1 or self.spec.kv_heads % tensor) else a for a in axes]
        return NamedSharding(self.mesh, PartitionSpec(*fits))

    def _state_sharding(self) -> Any:  # a State of shardings
        """Slots over data and fsdp."""
        if self.mesh is None:
            return None
        slots = tuple(a for a in ("data", "fsdp") if a in self.mesh.shape)
        a_kv, a_slot = self._sharding(slots, "tensor"), self._sharding(slots)
        shape = jax.eval_shape(lambda: st.new_state(self.spec, self.classes, 1, self.kv_dtype, self.segment))
        is_kv = lambda path: path[0].name == "own"  # noqa: E731
        return jax.tree_util.tree_map_with_path(lambda path, leaf: a_kv if is_kv(path) else a_slot, shape)


def _fetch(x: Any) -> np.ndarray:
    """On the host; zeros for what is known by its shape alone (Programs.ahead)."""
    return np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)
