"""Sampler: KV state, prefill, fused decode, draw, scoring, slot scheduler."""

from coevo_jax.sampler.engine import Engine
from coevo_jax.sampler.requests import Completion, Request

__all__ = ["Completion", "Engine", "Request"]
