"""An assistant turn as the model would write it: the text's token ids and the end token."""

from __future__ import annotations

import functools

import numpy as np

from coevo_jax.errors import UserError
from coevo_jax.text.chat import ChatTokenizer


def assistant_turn(tokenizer: ChatTokenizer, text: str) -> np.ndarray:
    """The text's ids and the end-of-turn id."""
    return np.asarray([*tokenizer.encode(text), end_of_turn(tokenizer)], np.int32)


@functools.cache
def end_of_turn(tokenizer: ChatTokenizer) -> int:
    """The stop id with which the chat template closes an assistant turn."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = tokenizer.render(turns, thinking=False, system="", add_generation_prompt=False)
    closing = [i for i in ids if i in tokenizer.stop_ids]
    if not closing:
        expected = f"one of the stop ids {tokenizer.stop_ids}"
        raise UserError("the chat template closes no assistant turn with a stop id", where="tokenizer", expected=expected)
    return closing[-1]
