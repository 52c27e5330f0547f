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

import dataclasses
import functools
import hashlib
import io
import json
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, cast

import jax

from coevo_jax.compiling import compilation_cache
from coevo_jax.config import Experiment, Sampling
from coevo_jax.config.override import to_dict
from coevo_jax.errors import UserError, nearest
from coevo_jax.judges import JUDGE_PROMPTS, Judge, JudgeItem, pairwise
from coevo_jax.methods.fixed_rubrics import NONE, fixed_rubric
from coevo_jax.progress import RunConsole
from coevo_jax.records.console import Console
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import parse_rubric, render_rubric
from coevo_jax.rubrics.endpoint import EndpointWriter
from coevo_jax.sampler import Completion, Request, guided
from coevo_jax.sampler.requests import check_prompt, check_sampling
from coevo_jax.serve.asks import (
    Ask,
    Call,
    ChatAsk,
    ChatResult,
    CompareAsk,
    CompareResult,
    Given,
    Result,
    RubricAsk,
    Said,
    ScoreAsk,
    ScoreResult,
    Token,
    Written,
    identity,
    read_rubric,
    scored,
)
from coevo_jax.serve.settings import Roles, rubric_free, serving_settings, side_by_side
from coevo_jax.serve.speakers import Cast, Speaker, compile_ahead, load_cast
from coevo_jax.text.parse import Parsed
from coevo_jax.text.prompts import prompt_slots, render_prompt, template_identity

Stop = Callable[[], bool]
LONGEST_TOKEN = 32  # characters that a token may stand for, with room to spare: a bound on texts before they are tokenized
LETTERS = {True: "A", False: "B"}


class Stopped(Exception):
    """Nobody waits for the results any more."""


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
    system = System(cfg, roles, load_cast(cfg, roles, console))
    if compile:
        compile_ahead(cfg, system.cast, console)
    return system


class System:
    """A loaded generator and judge. Safe for threads: one asks at a time."""

    def __init__(self, cfg: Experiment, roles: Roles, cast: Cast):
        self.cfg, self.roles, self.cast = cfg, roles, cast
        remote = cast.endpoints.get("generator")
        self.writer = EndpointWriter(remote, cfg.rubric) if remote is not None else None
        self.judge: Judge | None = cast.seat.judge if cast.seat is not None else None
        self.pair_judge: Judge | None = cast.seat.pairs if cast.seat is not None else None
        self._lock = threading.Lock()

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
        """A result each, in their order; a UserError for one that can't be answered. Equal work is done once.

        stop: asked between the steps of the engine; Stopped when it says so, and nothing is left behind.
        """
        with self._lock:
            return self._ask_all(asks, stop)

    def _ask_all(self, asks: Sequence[Ask], stop: Stop) -> list[Result | UserError]:
        problems = [self.problem(ask) for ask in asks]
        good = [ask for ask, problem in zip(asks, problems) if problem is None]
        rubrics = self._rubrics([ask for ask in good if not isinstance(ask, ChatAsk)], stop)
        chats = self._chats([ask for ask in good if isinstance(ask, ChatAsk)], stop)
        _look(stop)
        scores = self._scores([ask for ask in good if isinstance(ask, ScoreAsk)], rubrics)
        _look(stop)
        compared = self._comparisons([ask for ask in good if isinstance(ask, CompareAsk)], rubrics)
        found = rubrics | chats | scores | compared
        keys = [self._rubric_key(ask) if isinstance(ask, RubricAsk) else ask for ask in asks]
        return [problem or found[key] for key, problem in zip(keys, problems)]

    def problem(self, ask: Ask) -> UserError | None:
        """What of an ask can be known to be wrong without the model, or None."""
        try:
            self._check(ask)
        except UserError as error:
            return error
        return None

    # ---- rubrics ------------------------------------------------------------------------------------------------------

    def _rubrics(self, asks: Sequence[Any], stop: Stop) -> dict[Any, Any]:
        """`Written` by ask: of those that ask for it, and by RubricAsk of those that judge. A UserError in its place where a
        prompt is too long."""
        wanted = dict.fromkeys(want for ask in asks if (want := self._wanted(ask)) is not None)
        found: dict[Any, Any] = {}
        if fixed := self._fixed():
            return {want: Written(want.question, "ok", fixed) for want in wanted}
        pending = list(wanted)
        if self.writer is None:
            for want in pending:
                try:
                    self._rubric_ids(want)
                except UserError as error:
                    found[want] = error
        temperatures = (self.cfg.rubric_sampling.temperature, *self.cfg.rubric.retry_temperatures)
        for retry, temperature in enumerate(temperatures):
            pending = [want for want in wanted if want not in found or _again(found[want])]
            if not pending:
                break
            _look(stop)
            sampling = dataclasses.replace(self.cfg.rubric_sampling, temperature=temperature)
            for want, written in zip(pending, self._write(pending, sampling, retry, stop)):
                found[want] = dataclasses.replace(written, tries=retry + 1)
        return found

    def _wanted(self, ask: Any) -> RubricAsk | None:
        """The rubric that an ask needs written."""
        if isinstance(ask, RubricAsk):
            return self._rubric_key(ask)
        return None if ask.rubric is not None or rubric_free(self.cfg) else self._rubric_key(ask)

    def _rubric_key(self, ask: Any) -> RubricAsk:
        return RubricAsk(ask.question, ask.reference if self._shows_reference else "", ask.seed)

    @functools.cached_property
    def _shows_reference(self) -> bool:
        return "reference" in prompt_slots(self.cfg.rubric.prompt)

    def _fixed(self) -> Any:
        return fixed_rubric(self.cfg.rubric, {}).value if self.cfg.rubric.source == "predefined" else None

    def _messages(self, want: RubricAsk) -> list[dict[str, str]]:
        slots = {"reference": want.reference} if self._shows_reference else {}
        return render_prompt(self.cfg.rubric.prompt, question=want.question, **slots)

    def _rubric_ids(self, want: RubricAsk) -> list[int]:
        """The prompt that writes a rubric. UserError: too long."""
        author = self.cast.speakers["generator"]
        return _checked(author, author.prompt(self._messages(want)), "the prompt for a rubric", "question")

    def _write(self, wants: Sequence[RubricAsk], sampling: Sampling, retry: int, stop: Stop) -> list[Written]:
        if self.writer is not None:
            replies = self.writer.start([want.question for want in wants], sampling, retry)()
            failed = Written("", "refused", None, detail="the endpoint gave no rubric")
            return [
                dataclasses.replace(failed, question=w.question) if p is None else _written(w, p, "")
                for w, p in zip(wants, replies)
            ]
        author = self.cast.speakers["generator"]
        requests = [_request(self._rubric_ids(w), "rubric", sampling, w.seed, w, retry, grammar=self._grammar) for w in wants]
        return [
            _written(want, self._parse(completion), author.text(completion.tokens))
            for want, (completion,) in zip(wants, author.generate(requests, _watch(stop)))
        ]

    @functools.cached_property
    def _grammar(self) -> Any:
        if not self.cfg.rubric.guided:
            return None
        tokenizer = self.cast.speakers["generator"].tokenizer
        guided.check_no_reasoning(tokenizer, self.cfg.generator.thinking, "rubric.guided")
        return guided.rubric_grammar(tokenizer, self.cfg.rubric)

    def _parse(self, completion: Completion) -> Parsed[Any]:
        author, cut = self.cast.speakers["generator"], completion.finish == "length"
        return parse_rubric(author.text(completion.tokens), self.cfg.rubric, truncated=cut, opened=author.opened)

    def _rubric_of(self, ask: Any, rubrics: dict[Any, Any]) -> Any:
        """The `Written` under which an ask is judged, or a UserError."""
        if ask.rubric is not None:
            return Written(ask.question, "ok", ask.rubric)
        if rubric_free(self.cfg):
            return Written(ask.question, "ok", NONE)
        return rubrics[self._rubric_key(ask)]

    # ---- verdicts -----------------------------------------------------------------------------------------------------

    def _scores(self, asks: Sequence[ScoreAsk], rubrics: dict[Any, Any]) -> dict[Any, Any]:
        under = {ask: self._rubric_of(ask, rubrics) for ask in asks}
        ready = [ask for ask in under if isinstance(under[ask], Written) and under[ask].rubric is not None]
        items = {ask: [_item(ask, under[ask].rubric, answer) for answer in ask.answers] for ask in ready}
        verdicts = self._judge(self.judge, [item for own in items.values() for item in own])
        found: dict[Any, Any] = {}
        for ask, written in under.items():
            if isinstance(written, UserError):
                found[ask] = written
                continue
            many = self.cfg.judge.samples
            said = [scored(verdicts[i], len(i.rubric.criteria), many) for i in items.get(ask, ())]
            found[ask] = ScoreResult(written, tuple(said))
        return found

    def _judge(self, judge: Judge | None, items: Sequence[JudgeItem]) -> dict[JudgeItem, Verdict]:
        """Verdict by item, equal ones asked once and in an order of their own."""
        distinct = sorted(dict.fromkeys(items), key=lambda item: item.request)
        if not distinct:
            return {}
        assert judge is not None
        return dict(zip(distinct, judge.judge(distinct, 0)))

    def _comparisons(self, asks: Sequence[CompareAsk], rubrics: dict[Any, Any]) -> dict[Any, Any]:
        under = {ask: self._rubric_of(ask, rubrics) for ask in asks}
        ready = [ask for ask in under if isinstance(under[ask], Written) and under[ask].rubric is not None]
        both, pairs = side_by_side(self.cfg), {}
        for ask in ready:
            sides = ((ask.a, ask.b), (ask.b, ask.a))
            pairs[ask] = [_item(ask, under[ask].rubric, one, other if both else "") for one, other in sides]
        verdicts = self._judge(self.pair_judge if both else self.judge, [item for own in pairs.values() for item in own])
        found: dict[Any, Any] = {}
        for ask, written in under.items():
            if isinstance(written, UserError):
                found[ask] = written
            elif ask not in pairs:
                found[ask] = CompareResult(written, "pairwise" if both else "scores", written.status)
            else:
                read = compared_by_pairs if both else compared_by_scores
                found[ask] = read(written, *(verdicts[item] for item in pairs[ask]))
        return found

    # ---- chat ---------------------------------------------------------------------------------------------------------

    def speaker(self, name: str) -> Speaker:
        """The model of a role. UserError where it isn't here."""
        if name not in self.cast.speakers:
            known = list(self.cast.speakers)
            expected = f"one of {', '.join(known)}" if known else "a system with weights of its own"
            raise UserError(f"no model {name!r}", where="model", expected=expected, nearest=nearest(name, known))
        return self.cast.speakers[name]

    def _chats(self, asks: Sequence[ChatAsk], stop: Stop) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for name in sorted({ask.model for ask in asks}):
            own = list(dict.fromkeys(ask for ask in asks if ask.model == name))
            found |= self._chat(self.speaker(name), own, stop)
        return found

    def _chat(self, speaker: Speaker, asks: Sequence[ChatAsk], stop: Stop) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        prompts: dict[ChatAsk, list[int]] = {}
        for ask in asks:
            try:
                ids = speaker.prompt([{"role": role, "content": text} for role, text in ask.messages])
                prompts[ask] = _checked(speaker, ids, "the conversation", "messages")
            except UserError as error:
                found[ask] = error
        ready = list(prompts)
        _look(stop)
        requests = [_request(ids, f"chat/{a.model}", a.sampling, a.seed, a.messages, n=a.n) for a, ids in prompts.items()]
        listing = [ask for ask in ready if ask.top_logprobs]
        tops = speaker.likeliest([prompts[ask] for ask in listing], 20) if listing else []
        top = {ask: one[: ask.top_logprobs] for ask, one in zip(listing, tops)}
        for ask, completions in zip(ready, speaker.generate(requests, _watch(stop))):
            choices = tuple(_said(speaker, completion, ask.logprobs, top.get(ask, ())) for completion in completions)
            found[ask] = ChatResult(choices, len(prompts[ask]))
        return found

    # ---- checks and identity ------------------------------------------------------------------------------------------

    def _check(self, ask: Ask) -> None:
        if isinstance(ask, ChatAsk):
            engine = self.speaker(ask.model).engine
            check_sampling(ask.sampling, engine.cfg, "sampling")
            _need_text("".join(text for _, text in ask.messages), "messages", LONGEST_TOKEN * engine.cfg.max_prompt)
            return
        self._check_texts(ask)
        if isinstance(ask, RubricAsk) or (ask.rubric is None and not rubric_free(self.cfg)):
            self._check_writer(ask)
        if isinstance(ask, RubricAsk):
            return
        if self.judge is None:
            raise UserError("this system has no judge", where="judge", expected="a system that was loaded with one")
        if ask.reference == "" and self.cfg.judge.protocol == "likert_reference":
            raise UserError("the judge reads a reference answer", where="reference", expected="an answer known to be good")
        if isinstance(ask, ScoreAsk) and not ask.answers:
            raise UserError("no answers to score", where="answers", expected="at least one")

    def _check_texts(self, ask: Any) -> None:
        """Texts that can't fit any prompt are refused before somebody counts their tokens."""
        engines = [speaker.engine.cfg.max_prompt for speaker in self.cast.speakers.values()]
        most = LONGEST_TOKEN * max(engines) if engines else math.inf
        _need_text(ask.question, "question", most)
        for name, text in _texts(ask):
            if len(text) > most:
                _need_text(text, name, most)

    def _check_writer(self, ask: Any) -> None:
        fixed = self.cfg.rubric.source == "predefined"
        if not fixed and self.writer is None and "generator" not in self.cast.speakers:
            what = "the judge reads none" if rubric_free(self.cfg) else "this system has no rubric generator"
            raise UserError(what, where="rubric", expected="a rubric, or a system that was loaded with a generator")
        if self._shows_reference and self.writer is not None:
            raise UserError("an endpoint's generator is shown no reference", where="rubric.prompt", expected="another template")
        if self._shows_reference and not ask.reference and not fixed:
            raise UserError(
                f"the template {self.cfg.rubric.prompt!r} shows a reference answer", where="reference", expected="one"
            )
        slots = prompt_slots(self.cfg.rubric.prompt) - {"question", "reference"}
        if slots and not fixed:
            what = f"the template {self.cfg.rubric.prompt!r} shows {', '.join(sorted(slots))} besides the question"
            raise UserError(
                what, where="rubric.prompt", expected="--config.rubric.prompt=... of a template with a question alone"
            )

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


# ---------------------------------------------------------------------------------------------------------------- parts


def compared_by_pairs(written: Written, forward: Verdict, reverse: Verdict) -> CompareResult:
    """A comparison from a judge's verdicts on (a, b) and (b, a)."""
    letters = [_letter(verdict) for verdict in (forward, reverse)]
    calls = (_call("a", forward, pairwise.side_of(letters[0], "A")), _call("b", reverse, pairwise.side_of(letters[1], "B")))
    failure = next((v for v in (forward, reverse) if v.status != "ok"), None)
    if failure is not None:
        return CompareResult(written, "pairwise", failure.status, calls=calls)
    winner = {"own": "a", "other": "b", None: "tie"}[pairwise.agreed(*letters)]
    flipped = pairwise.order_flipped(*letters)
    return CompareResult(written, "pairwise", "ok", winner, pairwise.both_orders(*letters), flipped, calls)  # type: ignore[arg-type]


def compared_by_scores(written: Written, a: Verdict, b: Verdict) -> CompareResult:
    """A comparison from the verdicts on each answer alone: the higher score wins."""
    calls = tuple(Call(first, v.status, None, v.score, v.raw, v.detail) for first, v in zip(("a", "b"), (a, b)))  # type: ignore[arg-type]
    failure = next((v for v in (a, b) if v.score is None), None)
    if failure is not None or a.score is None or b.score is None:
        return CompareResult(written, "scores", failure.status if failure else "refused", calls=calls)
    preference = 0.5 + 0.5 * ((a.score > b.score) - (a.score < b.score))
    return CompareResult(written, "scores", "ok", {1.0: "a", 0.5: "tie", 0.0: "b"}[preference], preference, False, calls)  # type: ignore[arg-type]


def _letter(verdict: Verdict) -> str | None:
    """The winning slot. The mean of several samples names the slot of more of them."""
    if verdict.score is None:
        return None
    return "tie" if verdict.score == 0.5 else LETTERS[verdict.score > 0.5]


def _call(first: Any, verdict: Verdict, side: Any) -> Call:
    winner: Any = {"own": "a", "other": "b", "tie": "tie", None: None}[side]
    return Call(first, verdict.status, winner, None, verdict.raw, verdict.detail)


def _item(ask: Any, rubric: Any, answer: str, other: str = "") -> JudgeItem:
    """An answer to be judged. Its noise is named by what the judge sees, and the seed."""
    request = identity("judge", ask.seed, ask.question, render_rubric(rubric), answer, other, ask.reference)
    return JudgeItem(ask.question, rubric, answer, request, ask.reference, other)


def _request(ids: list[int], role: str, sampling: Sampling, seed: int, content: Any, retry: int = 0, n: int = 1,
             grammar: Any = None) -> Request:  # fmt: skip
    return Request(ids, n, role, 0, identity(role, seed, content, retry), sampling, grammar)  # type: ignore[arg-type]


def _checked(speaker: Speaker, ids: list[int], what: str, where: str) -> list[int]:
    limit = speaker.engine.cfg.max_prompt
    if len(ids) > limit:
        raise UserError(f"{what} has {len(ids)} tokens", where=where, expected=f"at most {limit} (sampler.max_prompt)")
    check_prompt(ids, limit, speaker.engine.spec.vocab_size, where)
    return ids


def _written(want: RubricAsk, parsed: Parsed[Any], raw: str) -> Written:
    raw = raw or (parsed.value.raw if parsed.value is not None else "")
    return Written(want.question, parsed.status, parsed.value, raw, detail=parsed.detail)


def _again(found: Written | UserError) -> bool:
    """Is another try due? An endpoint's failure was tried again already."""
    return isinstance(found, Written) and found.status in ("parse_fail", "truncated")


def _said(speaker: Speaker, completion: Completion, listed: bool, top: tuple[tuple[str, float], ...]) -> Said:
    text, finish, count = speaker.text(completion.tokens), completion.finish, len(completion.tokens)
    if not listed:
        return Said(text, finish, count)
    texts = [speaker.tokenizer.decode([i], keep_special=True) for i in completion.tokens.tolist()]
    logprobs = [min(p, 0.0) for p in completion.logprobs.tolist()]
    return Said(text, finish, count, tuple(Token(t, p, () if i else top) for i, (t, p) in enumerate(zip(texts, logprobs))))


def _texts(ask: Any) -> list[tuple[str, str]]:
    """What an ask holds besides its question, by name."""
    if isinstance(ask, RubricAsk):
        return [("reference", ask.reference)]
    own = [("a", ask.a), ("b", ask.b)] if isinstance(ask, CompareAsk) else [("answers", answer) for answer in ask.answers]
    return [*own, ("reference", ask.reference), ("rubric", "" if ask.rubric is None else ask.rubric.raw)]


def _need_text(text: str, where: str, most: float) -> None:
    if not text.strip():
        raise UserError(f"the {where} is empty", where=where, expected="a text")
    if len(text) > most:
        raise UserError(f"{len(text)} characters fit no prompt", where=where, expected=f"at most {most:g} (sampler.max_prompt)")


def _look(stop: Stop) -> None:
    if stop():
        raise Stopped


def _watch(stop: Stop) -> Callable[[int, int], None]:
    return lambda done, total: _look(stop)
