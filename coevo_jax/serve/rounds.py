"""How asks are answered: in rounds. Each asks the judge about all that is ready, then draws one text for all that needs one.

A rubric that comes out invalid is drawn again in the next round, colder, beside what has come meanwhile; so nobody waits for the
tries of another, and who only needs the judge has an answer before anything is drawn. What is drawn depends on (seed, content,
try) alone.

    draft = rounds.begin(ask)
    while draft.result is None:
        rounds.advance([draft, ...])
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from coevo_jax.config import Experiment, Sampling
from coevo_jax.errors import UserError, nearest
from coevo_jax.judges import Judge, JudgeItem, pairwise
from coevo_jax.methods.fixed_rubrics import NONE, fixed_rubric
from coevo_jax.records.verdicts import Verdict
from coevo_jax.rubrics import parse_rubric
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
    Result,
    RubricAsk,
    Said,
    ScoreAsk,
    ScoreResult,
    Token,
    Written,
    identity,
    scored,
)
from coevo_jax.serve.settings import rubric_free, side_by_side
from coevo_jax.serve.speakers import Cast, Speaker
from coevo_jax.text.parse import Parsed
from coevo_jax.text.prompts import prompt_slots, render_prompt

Stop = Callable[[], bool]
LONGEST_TOKEN = 32  # characters that a token may stand for, with room to spare: a bound on texts before they are tokenized
LETTERS = {True: "A", False: "B"}


class Stopped(Exception):
    """Nobody waits for the results any more."""


@dataclasses.dataclass(eq=False)
class Draft:
    """An ask on its way. rubric: once it is settled, valid or not; tries: how often one was drawn; result: at the end."""

    ask: Ask
    rubric: Written | None = None
    tries: int = 0
    result: Result | UserError | None = None


class Rounds:
    """What a cast answers. Safe for threads: their rounds take turns."""

    def __init__(self, cfg: Experiment, cast: Cast):
        self.cfg, self.cast = cfg, cast
        remote = cast.endpoints.get("generator")
        self.writer = EndpointWriter(remote, cfg.rubric) if remote is not None else None
        self.judge: Judge | None = cast.seat.judge if cast.seat is not None else None
        self.pair_judge: Judge | None = cast.seat.pairs if cast.seat is not None else None
        self._lock = threading.Lock()

    def begin(self, ask: Ask) -> Draft:
        """A draft of an ask; with a UserError as its result where the ask can be known to be wrong without the model."""
        draft = Draft(ask)
        try:
            self._check(ask)
        except UserError as error:
            draft.result = error
            return draft
        if not isinstance(ask, ChatAsk):
            draft.rubric = self._settled(ask)
        return draft

    def advance(
        self, drafts: Sequence[Draft], stop: Stop = lambda: False, deliver: Callable[[Draft], None] = lambda draft: None
    ) -> None:
        """One round of the drafts that have no result yet. Equal work is done once.

        deliver: called for each result as soon as it is there. stop: asked between the steps of the engine; Stopped when it says
        so, and nothing is left behind.
        """
        with self._lock:
            _look(stop)
            going = [draft for draft in drafts if draft.result is None]
            for step in (self._judge_ready, self._chat_round, self._write_round):
                step([draft for draft in going if draft.result is None], stop)
                for draft in going:
                    if draft.result is not None:
                        deliver(draft)
                going = [draft for draft in going if draft.result is None]

    # ---- rubrics ------------------------------------------------------------------------------------------------------

    def _settled(self, ask: Any) -> Written | None:
        """The rubric of an ask that needs none written."""
        if not isinstance(ask, RubricAsk):
            if ask.rubric is not None:
                return Written(ask.question, "ok", ask.rubric)
            if rubric_free(self.cfg):
                return Written(ask.question, "ok", NONE)
        fixed = fixed_rubric(self.cfg.rubric, {}).value if self.cfg.rubric.source == "predefined" else None
        return None if fixed is None else Written(ask.question, "ok", fixed)

    def _write_round(self, drafts: Sequence[Draft], stop: Stop) -> None:
        """Draw a rubric for each draft that has none; one that is settled and asked for is a result."""
        groups: dict[int, dict[RubricAsk, list[Draft]]] = {}
        for draft in drafts:
            if not isinstance(draft.ask, ChatAsk) and draft.rubric is None:
                groups.setdefault(draft.tries, {}).setdefault(self._rubric_key(draft.ask), []).append(draft)
        wants = [(want, tries) for tries in sorted(groups) for want in groups[tries]]
        for (want, tries), written in zip(wants, self._write(wants, stop) if wants else []):
            for draft in groups[tries][want]:
                self._take(draft, written)

    def _take(self, draft: Draft, written: Written | UserError) -> None:
        """A draft's newest rubric: settled where it is valid, or the last that is drawn."""
        if isinstance(written, UserError):
            draft.result = written
            return
        draft.tries += 1
        again = written.status in ("parse_fail", "truncated")  # an endpoint's failure was tried again already
        if again and draft.tries <= len(self.cfg.rubric.retry_temperatures):
            return
        draft.rubric = dataclasses.replace(written, question=draft.ask.question, tries=draft.tries)  # type: ignore[union-attr]
        if isinstance(draft.ask, RubricAsk):
            draft.result = draft.rubric

    def _rubric_key(self, ask: Any) -> RubricAsk:
        return RubricAsk(ask.question, ask.reference if self._shows_reference else "", ask.seed)

    @functools.cached_property
    def _shows_reference(self) -> bool:
        return "reference" in prompt_slots(self.cfg.rubric.prompt)

    def _messages(self, want: RubricAsk) -> list[dict[str, str]]:
        slots = {"reference": want.reference} if self._shows_reference else {}
        return render_prompt(self.cfg.rubric.prompt, question=want.question, **slots)

    def _rubric_ids(self, want: RubricAsk) -> list[int]:
        """The prompt that writes a rubric. UserError: too long."""
        author = self.cast.speakers["generator"]
        return _checked(author, author.prompt(self._messages(want)), "the prompt for a rubric", "question")

    def _sampling(self, tries: int) -> Sampling:
        """That of training first, then colder (design.md 4.1)."""
        temperatures = (self.cfg.rubric_sampling.temperature, *self.cfg.rubric.retry_temperatures)
        return dataclasses.replace(self.cfg.rubric_sampling, temperature=temperatures[tries])

    def _write(self, wants: Sequence[tuple[RubricAsk, int]], stop: Stop) -> list[Written | UserError]:
        """A rubric, valid or not, for each (question, tries before); a UserError for a prompt that is too long."""
        if self.writer is not None:
            return self._write_remote(self.writer, wants)
        author, found = self.cast.speakers["generator"], dict[int, Written | UserError]()
        requests: dict[int, Request] = {}
        for i, (want, tries) in enumerate(wants):
            try:
                ids = self._rubric_ids(want)
            except UserError as error:
                found[i] = error
                continue
            requests[i] = _request(ids, "rubric", self._sampling(tries), want.seed, want, tries, grammar=self._grammar)
        for i, (completion,) in zip(requests, author.generate(list(requests.values()), _watch(stop))):
            found[i] = _written(wants[i][0], self._parse(completion), author.text(completion.tokens))
        return [found[i] for i in range(len(wants))]

    def _write_remote(self, writer: EndpointWriter, wants: Sequence[tuple[RubricAsk, int]]) -> list[Written | UserError]:
        """All tries are under way at once; which of them they are decides about the temperature."""
        by_tries = {tries: [i for i, (_, t) in enumerate(wants) if t == tries] for tries in sorted({t for _, t in wants})}
        coming = {t: writer.start([wants[i][0].question for i in own], self._sampling(t), t) for t, own in by_tries.items()}
        found = {i: parsed for t, own in by_tries.items() for i, parsed in zip(own, coming[t]())}
        nothing = Written("", "refused", None, detail="the endpoint gave no rubric")
        return [nothing if (parsed := found[i]) is None else _written(want, parsed, "") for i, (want, _) in enumerate(wants)]

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

    # ---- verdicts -----------------------------------------------------------------------------------------------------

    def _judge_ready(self, drafts: Sequence[Draft], stop: Stop) -> None:
        """Ask the judge about every draft whose rubric is settled."""
        ready = [draft for draft in drafts if draft.rubric is not None]
        for draft in ready:
            if isinstance(draft.ask, RubricAsk):
                draft.result = draft.rubric
        self._score([draft for draft in ready if isinstance(draft.ask, ScoreAsk)])
        _look(stop)
        self._compare([draft for draft in ready if isinstance(draft.ask, CompareAsk)])

    def _score(self, drafts: Sequence[Any]) -> None:
        items = [[_item(d.ask, d.rubric.rubric, a) for a in d.ask.answers] if d.rubric.rubric is not None else [] for d in drafts]
        verdicts = self._judge(self.judge, [item for own in items for item in own])
        for draft, own in zip(drafts, items):
            said = [scored(verdicts[item.request], len(item.rubric.criteria), self.cfg.judge.samples) for item in own]
            draft.result = ScoreResult(draft.rubric, tuple(said))

    def _judge(self, judge: Judge | None, items: Sequence[JudgeItem]) -> dict[int, Verdict]:
        """Verdict by identity, equal items asked once and in an order of their own."""
        by_identity = {item.request: item for item in items}
        distinct = sorted(by_identity)
        if not distinct:
            return {}
        assert judge is not None
        return dict(zip(distinct, judge.judge([by_identity[i] for i in distinct], 0)))

    def _compare(self, drafts: Sequence[Any]) -> None:
        both = side_by_side(self.cfg)
        items = [_two_items(draft, both) if draft.rubric.rubric is not None else () for draft in drafts]
        verdicts = self._judge(self.pair_judge if both else self.judge, [item for own in items for item in own])
        read = compared_by_pairs if both else compared_by_scores
        for draft, own in zip(drafts, items):
            if own:
                draft.result = read(draft.rubric, *(verdicts[item.request] for item in own))
            else:
                draft.result = CompareResult(draft.rubric, "pairwise" if both else "scores", draft.rubric.status)

    # ---- chat ---------------------------------------------------------------------------------------------------------

    def speaker(self, name: str) -> Speaker:
        """The model of a role. UserError where it isn't here."""
        if name not in self.cast.speakers:
            known = list(self.cast.speakers)
            expected = f"one of {', '.join(known)}" if known else "a system with weights of its own"
            raise UserError(f"no model {name!r}", where="model", expected=expected, nearest=nearest(name, known))
        return self.cast.speakers[name]

    def _chat_round(self, drafts: Sequence[Draft], stop: Stop) -> None:
        chats = [(draft, draft.ask) for draft in drafts if isinstance(draft.ask, ChatAsk)]
        for name in sorted({ask.model for _, ask in chats}):
            own = list(dict.fromkeys(ask for _, ask in chats if ask.model == name))
            found = self._chat(self.speaker(name), own, stop)
            for draft, ask in chats:
                if ask in found:
                    draft.result = found[ask]

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

    # ---- checks -------------------------------------------------------------------------------------------------------

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
    request = identity("judge", ask.seed, ask.question, rubric.criteria, answer, other, ask.reference)
    return JudgeItem(ask.question, rubric, answer, request, ask.reference, other)


def _two_items(draft: Any, both: bool) -> tuple[JudgeItem, ...]:
    """(a, b) and (b, a) side by side, or a alone and b alone."""
    sides = ((draft.ask.a, draft.ask.b), (draft.ask.b, draft.ask.a))
    return tuple(_item(draft.ask, draft.rubric.rubric, one, other if both else "") for one, other in sides)


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
