"""lm_eval (EleutherAI's lm-evaluation-harness, extra 'harness') over our engine: its tasks as they are, our sampler and scoring.

    from coevo_jax.evaluate.harness import load
    lm_eval.simple_evaluate(model=load("run:runs/evolm"), tasks=["gsm8k"], limit=100, apply_chat_template=True)

Contexts that are too long are cut from the left, as the harness's own Hugging Face backend does. Stop texts cut a completion
where the first of them begins; the engine itself stops at the model's stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from coevo_jax.config import ModelConfig, SamplerConfig, Sampling
from coevo_jax.errors import UserError
from coevo_jax.evaluate.writers import number
from coevo_jax.sampler import Engine, Request
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.trained import load as load_weights

ROLE = "evaluation/harness"  # of the noise of sampled answers
BATCH = 64  # requests between two calls of the harness's cache


class EngineLM(TemplateLM):  # type: ignore[misc]
    """A model of ours as lm_eval's. max_length: tokens of a context and its completion together."""

    def __init__(self, engine: Engine, params: Any, tokenizer: ChatTokenizer, name: str = "coevo", thinking: bool = False):
        super().__init__()
        self.engine, self.params, self.text, self.name, self.thinking = engine, params, tokenizer, name, thinking
        self.max_length = engine.cfg.max_prompt + engine.cfg.max_new
        self.max_gen_toks = engine.cfg.max_new

    @property
    def eot_token_id(self) -> int:
        return self.text.stop_ids[0]

    @property
    def tokenizer_name(self) -> str:
        return f"{self.name}-{self.text.hash}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; special tokens in it, which a chat template wrote, count."""
        return self.text.encode_rendered(string)

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, by the rendering of training and use. With the last turn begun by the assistant, the text ends
        where it does."""
        system = next((m["content"] for m in chat_history if m["role"] == "system"), "")
        turns = [m for m in chat_history if m["role"] != "system"]
        if add_generation_prompt or not turns or turns[-1]["role"] != "assistant":
            return self.text.render_text(
                turns, thinking=self.thinking, system=system, add_generation_prompt=add_generation_prompt
            )
        head = self.text.render_text(turns[:-1], thinking=self.thinking, system=system)
        return head + turns[-1]["content"]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Names the template in the harness's results."""
        return self.text.hash

    # ---- log-likelihoods ----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        out: list[tuple[float, bool]] = []
        for start in range(0, len(requests), BATCH):
            batch = requests[start : start + BATCH]
            found = self._score([(context, continuation) for _, context, continuation in batch])
            out += found
            for (key, _, _), one in zip(batch, found):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, one)
        return out

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(sum of log-probs, are all tokens the likeliest?) of each continuation."""
        cut = [_fitting(context, continuation, self.max_length) for context, continuation in pairs]
        heads, tails = [context for context, _ in cut], [continuation for _, continuation in cut]
        scored = self.engine.score(self.params, heads, tails, greedy=True)
        return [(float(np.sum(rows[0], dtype=np.float64)), bool(rows[1].all())) for rows in scored]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, window by window, each token once and with as much context as there is room for."""
        out = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            out.append(sum(value for value, _ in self._score(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), out[-1])
        return out

    # ---- generation ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Completions, greedy where the task doesn't say otherwise."""
        out: list[str] = []
        for start in range(0, len(requests), BATCH):
            batch = [request.args for request in requests[start : start + BATCH]]
            asked = [self._request(context, kwargs) for context, kwargs in batch]
            for (context, kwargs), (completion,) in zip(batch, self.engine.generate(self.params, asked)):
                out.append(_until(self.text.decode(completion.tokens.tolist()), kwargs.get("until")))
                self.cache_hook.add_partial("generate_until", (context, kwargs), out[-1])
        return out

    def _request(self, context: str, kwargs: dict[str, Any]) -> Request:
        sampling = sampling_of(kwargs, self.max_gen_toks)
        ids = self.tok_encode(context)[-self.engine.cfg.max_prompt :] or [self.prefix_token_id]
        return Request(np.asarray(ids, np.int32), 1, ROLE, 0, number(context, sorted(map(str, kwargs.items()))), sampling)


def sampling_of(kwargs: dict[str, Any], most: int) -> Sampling:
    """The harness's generation arguments as ours. UserError for more tokens than the engine has room for."""
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    new = next((int(kwargs[name]) for name in names if kwargs.get(name)), most)
    if new > most:
        raise UserError(f"the task asks for {new} tokens", where="sampler.max_new", expected=f"at least {new}, it is {most}")
    drawn = kwargs.get("do_sample", kwargs.get("temperature", 0) > 0)
    temperature = float(kwargs.get("temperature", 1.0)) if drawn else 0.0
    return Sampling(temperature, float(kwargs.get("top_p") or 1.0), int(kwargs.get("top_k") or 0), new)


def _until(text: str, stops: str | Sequence[str] | None) -> str:
    """The text before the first stop text."""
    for stop in [stops] if isinstance(stops, str) else stops or []:
        if stop:
            text = text.split(stop)[0]
    return text


def _fitting(context: list[int], continuation: list[int], most: int) -> tuple[list[int], list[int]]:
    """Both within `most` tokens, cut from the left, with at least one token of context."""
    continuation = continuation[-(most - 1) :]
    return context[-(most - len(continuation)) :], continuation


def load(source: str, sampler: SamplerConfig | None = None, dtype: str = "float32", thinking: bool = False) -> EngineLM:
    """A model source as lm_eval's model. UserError as in load_model."""
    model = load_weights(ModelConfig(source, dtype, dtype))
    tokenizer = ChatTokenizer.load(model.folder)
    cfg = sampler or SamplerConfig(slots=16, max_prompt=1536, max_new=512, prefill_tokens=4096)
    return EngineLM(Engine(model.spec, cfg, tokenizer.stop_ids), model.params, tokenizer, source, thinking)
