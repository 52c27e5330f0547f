"""A trained generator and judge as a library.

    import coevo_jax
    system = coevo_jax.load_system("run:runs/demo")
    rubric = system.rubric("Why is the sky blue?")
    result = system.score("Why is the sky blue?", ["Air scatters blue light most.", "It mirrors the sea."], rubric)
    print(rubric.text, result.scores)

Prompts are those of training, rendered by the same functions. The noise of a draw is named by (seed, content of the request), so
the same question gets the same rubric in any company. A failure of the judge is never a score (design.md 4.1).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, cast

import jax

from coevo_jax.compiling import compilation_cache
from coevo_jax.config import Experiment, Sampling
from coevo_jax.config.override import to_dict
from coevo_jax.errors import UserError
from coevo_jax.judges import JUDGE_PROMPTS, pairwise
from coevo_jax.progress import RunConsole
from coevo_jax.records.console import Console
from coevo_jax.serve.asks import (
    Ask,
    ChatAsk,
    ChatResult,
    CompareAsk,
    CompareResult,
    Given,
    Result,
    RubricAsk,
    ScoreAsk,
    ScoreResult,
    Written,
    read_rubric,
)
from coevo_jax.serve.rounds import Rounds, Stop
from coevo_jax.serve.settings import serving_settings
from coevo_jax.serve.speakers import compile_ahead, load_cast
from coevo_jax.text.prompts import template_identity


def load_system(
    generator: str | None = None, judge: str | None = None, *, policy: str | None = None,
    config: str | Experiment | None = None, overrides: Iterable[str] = (), compile: bool = False, stream: TextIO | None = None,
) -> System:  # fmt: skip
    """Load what answers questions about answers. Sources are those of a config: smollm2, tiny, a Hugging Face folder, a .gguf
    file, an Orbax folder, run:FOLDER#WEIGHTS@UPDATE; the judge also 'oracle' (the small world's rules); or api:MODEL.

    What is left out comes from `config` (a file, a run folder, a record), else from the run that is named: judge, prompts,
    schema, sampling. overrides: 'key=value' as of run.py. compile: all programs now, and none later; else each when it is first
    needed. stream: where progress is told. UserError: bad sources or settings.
    """
    cfg, roles = serving_settings(generator, judge, policy, config, overrides)
    console = RunConsole(Console(stream or io.StringIO()))
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        compilation_cache(cfg, console)
    system = System(cfg, load_cast(cfg, roles, console))
    if compile:
        compile_ahead(cfg, system.cast, console)
    return system


class System(Rounds):
    """A loaded generator and judge. Safe for threads: their rounds take turns."""

    # ---- one question -------------------------------------------------------------------------------------------------

    def rubric(self, question: str, *, reference: str = "", seed: int = 0) -> Written:
        """A rubric for a question. Its status is not 'ok' where the generator wrote none that is valid, colder each time."""
        return self.ask(RubricAsk(question, reference, seed))  # type: ignore[return-value]

    def score(
        self, question: str, answers: Sequence[str], rubric: Written | Given = None, *, reference: str = "", seed: int = 0
    ) -> ScoreResult:
        """Score each answer alone, under the rubric given or one that is written first. UserError: bad input, or no judge."""
        given = self.given(rubric)
        return self.ask(ScoreAsk(question, tuple(answers), given, reference, seed))  # type: ignore[return-value]

    def compare(
        self, question: str, a: str, b: str, rubric: Written | Given = None, *, reference: str = "", seed: int = 0
    ) -> CompareResult:
        """Which answer is better, asked in both orders, with the judge's texts. UserError as in score."""
        return self.ask(CompareAsk(question, a, b, self.given(rubric), reference, seed))  # type: ignore[return-value]

    def chat(self, messages: Sequence[dict[str, str]], model: str = "policy", n: int = 1, seed: int = 0,
             sampling: Sampling | None = None) -> list[str]:  # fmt: skip
        """Texts of n completions of a conversation. sampling None: that of answers."""
        found = self.ask(ChatAsk(model, tuple((m["role"], m["content"]) for m in messages), sampling or self.cfg.answer, n, seed))
        return [said.text for said in cast(ChatResult, found).choices]

    def given(self, rubric: Written | Given) -> Any:
        """A rubric as a caller gave it, as a record; None: one is to be written."""
        if isinstance(rubric, Written):
            if rubric.rubric is None:
                raise UserError(
                    f"there is no rubric: {rubric.detail}", where="rubric", expected=f"status ok, not {rubric.status}"
                )
            return rubric.rubric
        return read_rubric(rubric, self.cfg.rubric)

    # ---- many questions -----------------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> Result:
        """One ask. UserError: bad input."""
        (found,) = self.ask_all([ask])
        if isinstance(found, UserError):
            raise found
        return found

    def ask_all(self, asks: Sequence[Ask], stop: Stop = lambda: False) -> list[Result | UserError]:
        """A result each, in their order; a UserError for one that can't be answered. stop: as of `advance`."""
        drafts = [self.begin(ask) for ask in asks]
        while going := [draft for draft in drafts if draft.result is None]:
            self.advance(going, stop)
        return [draft.result for draft in drafts if draft.result is not None]

    def identity(self) -> str:
        """Names what decides about results: weights, tokenizers, prompts, settings, seed. Slots and addresses don't."""
        cfg = to_dict(self.cfg)
        kept = {name: cfg[name] for name in ("seed", "rubric", "rubric_sampling", "answer")}
        judge = {
            key: value for key, value in cfg["judge"].items() if key not in ("endpoint", "alarm_failure_share", "length_classes")
        }
        parts: dict[str, Any] = {"settings": kept, "judge": judge, "thinking": cfg["generator"]["thinking"]}
        parts |= {"weights": self.cast.weights(), "remote": {r: e.model for r, e in sorted(self.cast.endpoints.items())}}
        parts |= {"tokenizers": {role: speaker.tokenizer.hash for role, speaker in sorted(self.cast.speakers.items())}}
        names = [self.cfg.rubric.prompt, JUDGE_PROMPTS.get(self.cfg.judge.protocol, ""), pairwise.TEMPLATE]
        parts["prompts"] = [template_identity(name)[0] for name in names if name]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def close(self) -> None:
        """End what runs in the background."""
        for endpoint in self.cast.endpoints.values():
            endpoint.close()
