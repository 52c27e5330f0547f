"""Data: prompts, pairs, rankings and chat from JSONL or Parquet, mixtures, a cursor for each prompt slot. Imports no JAX."""

from coevo_jax.data.prompts import PromptSet, read_chat, read_pairs, read_prompts, read_rankings
from coevo_jax.data.stream import SlotStream

__all__ = ["PromptSet", "SlotStream", "read_chat", "read_pairs", "read_prompts", "read_rankings"]
