"""The engine: one decoder for every role. Device work is pure jitted programs over a donated state; Python holds a queue.

    engine = Engine(spec, cfg.sampler, stop_ids, seed=run_seed)
    engine.warmup(params)
    completions = engine.generate(params, requests)      # [request][sample]

Weights are arguments, so one engine serves several weight sets of one architecture and never holds stale ones: keys, values
and the per-layer copies of the weights live as long as one call.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax.config import SamplerConfig
from coevo_jax.errors import UserError
from coevo_jax.models.prefix import SharedRow, shared_rows
from coevo_jax.models.spec import ModelSpec
from coevo_jax.sampler import decode, prefill, scoring
from coevo_jax.sampler import state as st
from coevo_jax.sampler.programs import Programs, signature
from coevo_jax.sampler.queue import Queue, Sample
from coevo_jax.sampler.requests import Completion, Request, check_prompt, check_request
from coevo_jax.sampler.stats import Stats

Params = dict[str, Any]
Progress = Callable[[int, int], None]
Forms = Sequence[Sequence[int]]
KV_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class Engine:
    """Slots, programs and counters for one architecture. `stats` counts since its last reset."""

    def __init__(self, spec: ModelSpec, cfg: SamplerConfig, stop_ids: Sequence[int], mesh: Mesh | None = None, seed: int = 0):
        self.spec, self.cfg, self.mesh, self.seed = spec, cfg, mesh, seed
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.kv_dtype = KV_DTYPES[cfg.kv_dtype]
        self.positions = _round_up(cfg.max_prompt + cfg.max_new, 32)
        quarter = _round_up(self.positions // 4, 32)
        self.reaches = sorted({min(quarter * i, self.positions) for i in (1, 2, 3, 4)} | {self.positions})
        self.prompt_buckets = prefill.buckets(cfg.max_prompt, cfg.prefill_tokens)
        self.score_buckets = prefill.buckets(cfg.max_prompt + cfg.max_new, cfg.prefill_tokens)
        self.leave_at = cfg.slots - max(1, math.ceil(cfg.refill_free_share * cfg.slots))
        self.programs = Programs()
        self.stats = Stats()
        self._check_mesh()

    # ---- what a caller uses --------------------------------------------------------------------------------------------

    def warmup(self, params: Params, *, top_p: bool = False, next_token: bool = True, score: bool = False) -> float:
        """Compile every program ahead, for weights like `params`; a compile after this is an error. Returns seconds.

        top_p: also the variants for truncated support; next_token, score: those of the two scoring calls. May be called again
        for weights of another dtype or sharding.
        """
        start, self.programs.sealed = time.perf_counter(), False
        weights = self._prepare(params)
        state = self._new_state()
        for bucket in self.prompt_buckets:
            buffer = self._prefill(weights, prefill.pack([np.zeros(1, np.int32)], bucket))
            state = self._admit(state, buffer, st.Admission(*(np.int32(0), *self._no_admission())))
        for reach in self.reaches:
            for truncated in (False, True) if top_p else (False,):
                state, *_ = self._decode(weights, state, reach, truncated, steps=0, leave_at=0)
        one = [np.zeros(1, np.int32)]
        for bucket in self.prompt_buckets if next_token else ():
            self._next_token(params, scoring.pack_shared([SharedRow((0,), 0)], one, bucket), scoring.id_table([[0]])[0])
        for bucket in self.score_buckets if score else ():
            self._score(params, prefill.pack(one, bucket), 1.0)
        self.programs.sealed = True
        return time.perf_counter() - start

    def generate(self, params: Params, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Completion]]:
        """Completions of each request, n samples in order. progress(done, total) counts completions, once a dispatch.

        UserError: an empty or too long prompt, or a sampling value out of range. Interrupting it leaves nothing behind.
        """
        start = time.perf_counter()
        requests = [check_request(r, self.cfg, self.spec.vocab_size) for r in requests]
        results: list[list[Completion | None]] = [[None] * r.n for r in requests]
        total, done = sum(r.n for r in requests), 0
        if not total:
            return [[] for _ in requests]
        truncated = any(r.sampling.top_p < 1 or r.sampling.top_k > 0 for r in requests)
        queue = Queue(requests, self.seed, most_prompts=self.cfg.slots)
        weights, state, running = self._prepare(params), self._new_state(), dict[int, Sample]()
        while queue or running:
            state = self._refill(weights, state, queue, running)
            state = self._dispatch(weights, state, running, truncated, waiting=bool(queue))
            for sample, completion in self._harvest(state, running):
                results[sample.index][sample.number] = completion
                done += 1
            if progress is not None:
                progress(done, total)
        self.stats.seconds += time.perf_counter() - start
        return results  # type: ignore[return-value]

    def next_token_probs(self, params: Params, prompts: Sequence[Sequence[int] | np.ndarray], forms: Forms) -> np.ndarray:
        """Probability that the next token is one of each form's ids, [prompts, forms] float32.

        Equal prompts run once, and prompts that begin alike share their beginning (models/prefix.py).
        """
        start = time.perf_counter()
        limit, vocab = self.cfg.max_prompt, self.spec.vocab_size
        ids = [check_prompt(p, limit, vocab, f"prompt {i} of next_token_probs") for i, p in enumerate(prompts)]
        for f, form in enumerate(forms):
            check_prompt(form, vocab, vocab, f"form {f} of next_token_probs")
        table, columns = scoring.id_table(forms)
        todo, which = scoring.distinct(ids)
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(todo)
        lengths = [len(t) for t in todo]
        rows = shared_rows(todo, lengths, self.prompt_buckets[-1][1], self.prompt_buckets[-1][1] // 16)
        while rows:
            bucket = self._bucket_for(rows, lengths)
            batch = scoring.pack_shared(rows[: bucket[0]], todo, bucket)
            rows = rows[bucket[0] :]
            for i, row in zip(batch.members, self._next_token(params, batch, table)):
                found[i] = np.asarray([row[c].sum() for c in columns], np.float32)
        self.stats.seconds += time.perf_counter() - start
        return np.stack([found[i] for i in which]) if ids else np.zeros((0, len(forms)), np.float32)

    def score(
        self,
        params: Params,
        prompts: Sequence[Sequence[int] | np.ndarray],
        continuations: Sequence[Sequence[int] | np.ndarray],
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Log-prob of each token of each continuation given its prompt and what precedes it, float32, in nats."""
        start = time.perf_counter()
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts for {len(continuations)} continuations")
        limit, vocab = self.cfg.max_prompt + self.cfg.max_new, self.spec.vocab_size
        heads = [check_prompt(p, limit, vocab, f"prompt {i} of score") for i, p in enumerate(prompts)]
        whole = [np.concatenate([h, np.asarray(c, np.int32)]) for h, c in zip(heads, continuations)]
        whole = [check_prompt(w, limit, vocab, f"prompt and continuation {i} of score") for i, w in enumerate(whole)]
        found: list[np.ndarray] = []
        while len(found) < len(whole):
            packed, batch = self._take(whole[len(found) :], self.score_buckets)
            logp = self._score(params, packed, temperature)
            for (row, offset), ids in zip(packed.places, batch):
                first = offset + len(heads[len(found)]) - 1  # the position that predicts the continuation's first token
                found.append(logp[row, first : offset + len(ids) - 1].copy())
        self.stats.seconds += time.perf_counter() - start
        return found

    # ---- one turn of the loop ------------------------------------------------------------------------------------------

    def _refill(self, weights: Params, state: st.State, queue: Queue, running: dict[int, Sample]) -> st.State:
        free = [slot for slot in range(self.cfg.slots) if slot not in running]
        while free and (plan := queue.next_prefill(len(free), self.prompt_buckets)) is not None:
            packed, prompts = plan
            queue.store(packed, prompts, self._prefill(weights, packed))
        if free and queue:
            given, admissions = queue.admit(free, self.cfg.slots)
            running.update(given)
            for buffer, admission in admissions:
                state = self._admit(state, buffer, admission)
            for slot, sample in given.items():
                self._reach[slot] = len(queue.requests[sample.index].prompt) - 1
        return state

    def _dispatch(self, weights: Params, state: st.State, running: dict[int, Sample], truncated: bool, waiting: bool) -> st.State:
        """Decode some steps with the shortest reach that holds them."""
        start = time.perf_counter()
        steps = self.cfg.steps_per_dispatch
        needed = min(max(self._reach[slot] for slot in running) + steps, self.positions)
        reach = next(r for r in self.reaches if r >= needed)
        state, steps_done, used = self._decode(weights, state, reach, truncated, steps, self.leave_at if waiting else 0)
        done = int(steps_done)
        for slot in running:
            self._reach[slot] += done
        self.stats.dispatches += 1
        self.stats.row_steps += int(used)
        self.stats.slot_steps += done * self.cfg.slots
        self.stats.decode_seconds += time.perf_counter() - start
        return state

    def _harvest(self, state: st.State, running: dict[int, Sample]) -> list[tuple[Sample, Completion]]:
        """Take finished completions out of their slots."""
        active, finish, drawn = jax.device_get((state.rows.active, state.rows.finish, state.rows.drawn))
        finished = [slot for slot in running if not active[slot]]
        if not finished:
            return []
        out = jax.device_get(state.drawings)
        harvest = []
        for slot in finished:
            n, sample = int(drawn[slot]), running.pop(slot)
            row = Completion(
                out.tokens[slot, :n].copy(), out.logprobs[slot, :n].copy(), out.entropy[slot, :n].copy(),
                st.FINISH[int(finish[slot])],
            )  # fmt: skip
            if not np.isfinite(row.logprobs).all():
                raise RuntimeError(
                    f"sampled log-probs of request {sample.index} are not finite: the weights hold NaN or infinities"
                )
            harvest.append((sample, row))
            self.stats.tokens += n
            self.stats.sequences += 1
        return harvest

    def _take(self, sequences: list[np.ndarray], shapes: list[prefill.Bucket]) -> tuple[prefill.Packed, list[np.ndarray]]:
        """Pack the leading sequences into the largest program (or a smaller one that holds all that are left)."""
        at_most = min(self._batch(shapes[-1]), len(sequences))
        count, bucket = prefill.take([len(s) for s in sequences], shapes, at_most, at_most)
        count = min(count, self._batch(bucket))
        return prefill.pack(sequences[:count], bucket), sequences[:count]

    # ---- compiled programs ---------------------------------------------------------------------------------------------

    def _prepare(self, params: Params) -> Params:
        """Weights as decode wants them: one tree a layer. The dtype of the embedding is the compute dtype."""
        dtype = params["embed"].dtype
        split = self.programs.get(
            ("weights", signature(params["layers"]), str(dtype)), functools.partial(decode.split_layers, dtype=dtype),
            (params["layers"],),
        )  # fmt: skip
        return {**params, "layers": split(params["layers"])}

    def _new_state(self) -> st.State:
        self._reach = [0] * self.cfg.slots  # positions filled, as far as the host knows (an upper bound)
        make = functools.partial(
            st.new_state, self.spec, self.cfg.slots, self.positions, self.cfg.max_new, self.kv_dtype
        )  # fmt: skip
        return self.programs.get(("state",), make, (), out_shardings=self._state_sharding())()

    def _prefill(self, weights: Params, packed: prefill.Packed) -> st.PromptKV:
        start = time.perf_counter()
        function = functools.partial(prefill.prefill, spec=self.spec, dtype=weights["embed"].dtype, kv_dtype=self.kv_dtype)
        args = (weights, packed.tokens, packed.positions, packed.segments)
        key = ("prefill", packed.bucket, signature(weights))
        buffer = self.programs.get(key, function, args, out_shardings=self._sharding(None, "tensor"))(*args)
        jax.block_until_ready(buffer)
        self.stats.prefill_tokens += int((packed.segments > 0).sum())
        self.stats.prefill_seconds += time.perf_counter() - start
        return buffer

    def _admit(self, state: st.State, buffer: st.PromptKV, admission: st.Admission) -> st.State:
        args, shape = (state, buffer, admission), buffer.keys[0].shape
        key = ("admit", (shape[0], shape[3]))
        return self.programs.get(key, st.admit, args, donate_argnums=0, out_shardings=self._state_sharding())(*args)

    def _decode(
        self, weights: Params, state: st.State, reach: int, truncated: bool, steps: int, leave_at: int
    ) -> tuple[st.State, jax.Array, jax.Array]:
        function = functools.partial(
            decode.decode, spec=self.spec, stop_ids=self.stop_ids, reach=reach, truncated=truncated, dtype=weights["embed"].dtype
        )
        args = (weights, state, np.int32(steps), np.int32(leave_at))
        key = ("decode", reach, "truncated" if truncated else "full", signature(weights))
        sharding = self._state_sharding()
        out = None if sharding is None else (sharding, None, None)
        return self.programs.get(key, function, args, donate_argnums=1, out_shardings=out)(*args)

    def _bucket_for(self, rows: list[SharedRow], lengths: list[int]) -> prefill.Bucket:
        """The smallest program that holds all rows, or the largest."""
        widest = max(row.size(lengths) for row in rows)
        fits = (b for b in self.prompt_buckets if b[0] >= len(rows) and b[1] >= widest)
        return next(fits, self.prompt_buckets[-1])

    def _next_token(self, params: Params, batch: scoring.SharedBatch, table: np.ndarray) -> np.ndarray:
        start, bucket = time.perf_counter(), batch.tokens.shape
        last = np.zeros(self._batch(bucket), np.int32)
        last[: len(batch.last)] = batch.last
        function = functools.partial(scoring.next_token_program, spec=self.spec, dtype=params["embed"].dtype)
        args = (params, batch.tokens, batch.positions, batch.segments, batch.parents, last, table)
        key = ("next token", bucket, len(table), signature(params))
        probs = np.asarray(self.programs.get(key, function, args)(*args))[: len(batch.last)]
        self._count_scoring(batch.segments, start)
        return probs

    def _score(self, params: Params, packed: prefill.Packed, temperature: float) -> np.ndarray:
        start = time.perf_counter()
        function = functools.partial(scoring.score_program, spec=self.spec, dtype=params["embed"].dtype)
        args = (
            params, packed.tokens, packed.positions, packed.segments, scoring.shifted_targets(packed.tokens),
            np.float32(temperature),
        )  # fmt: skip
        key = ("score", packed.bucket, signature(params))
        logp = np.asarray(self.programs.get(key, function, args)(*args))
        self._count_scoring(packed.segments, start)
        return logp

    def _count_scoring(self, segments: np.ndarray, start: float) -> None:
        self.stats.prefill_tokens += int((segments > 0).sum())
        self.stats.prefill_seconds += time.perf_counter() - start

    def _batch(self, bucket: prefill.Bucket) -> int:
        """Most sequences of one scoring program: bounds its logits."""
        return max(1, bucket[0] * bucket[1] // 16)

    def _no_admission(self) -> tuple[Any, ...]:
        zeros = np.zeros(self.cfg.slots, np.int32)
        return zeros, zeros, zeros, st.new_rows(self.cfg.slots)

    # ---- mesh ----------------------------------------------------------------------------------------------------------

    def _check_mesh(self) -> None:
        if self.mesh is None:
            return
        shards = math.prod(self.mesh.shape.get(axis, 1) for axis in ("data", "fsdp"))
        if self.cfg.slots % shards:
            raise UserError(f"sampler.slots = {self.cfg.slots} does not divide over {shards} devices", where="sampler.slots",
                            expected=f"a multiple of {shards}", nearest=str(_round_up(self.cfg.slots, shards)))  # fmt: skip

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
        kv = self._sharding(slots, "tensor")
        a_slot = self._sharding(slots)
        shape = jax.eval_shape(lambda: st.new_state(self.spec, 1, 1, 1, self.kv_dtype))
        return jax.tree.map(lambda leaf: kv if leaf.ndim == 4 else a_slot, shape)
