"""OpenAI-compatible endpoints: connections with deadlines, retries, a cache on disk, counters. Use: docs/remote.md."""

from __future__ import annotations

from coevo_jax.remote.client import Endpoint
from coevo_jax.remote.messages import Ask, Reply

__all__ = ["Ask", "Endpoint", "Reply"]
