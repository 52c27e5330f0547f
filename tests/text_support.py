"""Tiny tokenizers with the templates of several families, written as Hugging Face folders."""

from __future__ import annotations

import json
import pathlib

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen2.5 and SmolLM2: a default of their own where no system turn is given.
CHATML_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are the default.<|im_end|>\\n' }}{% endif %}" + CHATML
)
# Qwen3: thinking switched off by an empty block in the prompt.
CHATML_THINKING = (
    CHATML[: -len("{% endif %}")]
    + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
# Some reasoning models open the block themselves.
CHATML_OPENS = CHATML[: -len("{% endif %}")] + "{{ '<think>\\n' }}{% endif %}"
# Llama 3: the template writes the first token, and the tokenizer would add it again. A date from the clock, too.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if m['role'] == 'system' and strftime_now is defined %}{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}{% endif %}"
    "{{ m['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Gemma: no system turn.
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|eot_id|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)
# A template that drops the system turn without a word.
DROPS_SYSTEM = "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"

SPECIAL = ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
PLAIN = ["<think>", "</think>"]  # added tokens that are not special, as in Qwen3


def make_tokenizer(
    folder: pathlib.Path,
    template: str | None,
    *,
    eos: str | None = "<|im_end|>",
    bos: bool = False,
    words: tuple[str, ...] = (),
    special_tags: bool = False,
) -> pathlib.Path:
    """A byte-level tokenizer (256 bytes, the specials, `words` as single tokens) in `folder`. bos: it adds its first token.
    special_tags: the reasoning tags are special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        plain = word.strip()
        pairs = [(plain[:i], plain[i]) for i in range(1, len(plain))] + [("Ġ", plain)] * word.startswith(" ")
        for pair in pairs:  # the word first, then the space in front of it
            vocab.setdefault("".join(pair), len(vocab))
            merges += [pair] if pair not in merges else []
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=special_tags, normalized=False) for t in PLAIN])
    if bos:
        first = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", first)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder
