"""What is compiled before a run begins: the sampler's programs of every model that speaks, and where compiled code is kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax

from coevo_jax.bench import Seat
from coevo_jax.config import Experiment
from coevo_jax.config.several import all_judges
from coevo_jax.errors import UserError
from coevo_jax.judges.scalar import RewardModel, ScalarJudge
from coevo_jax.models.files import user_cache
from coevo_jax.progress import RunConsole


def judge_speakers(seats: Iterable[Seat]) -> list[Any]:
    """What `compile_programs` takes of judges."""
    found: list[Any] = []
    for seat in seats:
        if isinstance(seat.judge, ScalarJudge):
            found.append(seat.judge.instrument)
        elif seat.engine is not None:
            found.append((seat.engine, seat.params, seat.cfg.protocol == "criterion_logits"))
    return found


def compile_programs(cfg: Experiment, console: RunConsole, speakers: Iterable[Any]) -> None:
    """Compile the programs of reward models and of (engine, weights, does it ask for next-token probabilities?)."""
    judges = (*all_judges(cfg), *((cfg.heldout_judge,) if cfg.heldout_judge.source else ()))
    drawn = (cfg.answer, cfg.rubric_sampling, cfg.question_sampling, *(judge.sampling for judge in judges))
    drawn += (cfg.evaluate.answer, cfg.evaluate.rubric) if cfg.evaluate.every else ()
    truncated = cfg.compat.top_p > 0 or any(s.top_p < 1 or s.top_k > 0 for s in drawn)
    guided = cfg.rubric.guided or any(judge.guided for judge in judges)
    if not (speakers := list(speakers)):
        return
    console.note("compiling the sampler")
    seconds, begin, shown = 0.0, time.monotonic(), [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if (now := time.monotonic()) - shown[0] > 10:
            shown[0] = now
            console.note(f"   program {done}/{total}, {now - begin:.0f} s")

    for speaker in speakers:
        if isinstance(speaker, RewardModel):
            speaker.warm_up()
            continue
        engine, params, asks = speaker
        seconds += engine.warmup(params, top_p=truncated, next_token=asks, guided=guided, progress=progress)
    _give_back_memory()
    console.note(f"compiled in {seconds:.1f} s")


def _give_back_memory() -> None:
    """Return what the compiler freed to the system: glibc keeps over 1 GiB of it otherwise (measured on the demo)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def compilation_cache(cfg: Experiment, console: RunConsole) -> None:
    """JAX's persistent cache, kept apart by processor, since compiled CPU code may use what another one lacks."""
    folder = pathlib.Path(cfg.run.compile_cache or user_cache() / "compiled" / _processor())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the compile cache can't be made: {error}", where="run.compile_cache", expected="a writable folder"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    console.note(f"compile cache: {folder}")


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        lines = [line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        lines = [os.uname().machine]
    return hashlib.sha256("".join(sorted(set(lines))).encode()).hexdigest()[:12]
