"""Rubrics: one file a schema (parse, validate, render, format reward, statistics), chosen by `rubric.schema`."""

from __future__ import annotations

from coevo_jax.config import RubricConfig
from coevo_jax.errors import UserError, nearest
from coevo_jax.rubrics import json_criteria, numbered_list, rar, rlcer, weighted_items
from coevo_jax.rubrics.json_criteria import Criterion, Rubric, format_reward, numbered, render_rubric, rubric_stats
from coevo_jax.text.parse import Parsed

SCHEMAS = {
    "json_criteria": json_criteria.parse_rubric,
    "rar": rar.parse_rubric,
    "points": rlcer.parse_rubric,
    "weighted_items": weighted_items.parse_rubric,
    "numbered_rules": numbered_list.parse_rubric,
}


def parse_rubric(text: str, cfg: RubricConfig, *, truncated: bool = False, opened: bool = False) -> Parsed[Rubric]:
    """A generator's text as a rubric, by the schema of the config."""
    if cfg.schema not in SCHEMAS:
        raise UserError(
            f"no rubric schema {cfg.schema!r}",
            where="rubric.schema",
            expected=f"one of {', '.join(SCHEMAS)}",
            nearest=nearest(cfg.schema, SCHEMAS),
        )
    return SCHEMAS[cfg.schema](text, cfg, truncated=truncated, opened=opened)


__all__ = ["SCHEMAS", "Criterion", "Rubric", "format_reward", "numbered", "parse_rubric", "render_rubric", "rubric_stats"]
