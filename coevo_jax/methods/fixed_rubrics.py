"""Rubrics that no model writes during a run (rubric.source): none at all, RaR's predefined one, or those of the data set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coevo_jax.config import Experiment, RubricConfig
from coevo_jax.errors import UserError
from coevo_jax.rubrics import Rubric, parse_rubric, rar
from coevo_jax.text.parse import Parsed

NONE = Rubric(())  # of judges that read none


def fixed_rubric(cfg: RubricConfig, record: Mapping[str, Any]) -> Parsed[Rubric]:
    """The rubric of a record under cfg.source 'none', 'predefined' or 'data'."""
    if cfg.source == "data":
        found = record.get("rubric")
        return parse_rubric(found if isinstance(found, str) else json.dumps(found), cfg)
    return Parsed("ok", {"none": NONE, "predefined": rar.PREDEFINED}[cfg.source])


def check_records(cfg: Experiment, records: Sequence[Mapping[str, Any]]) -> None:
    """Every record has the rubric and the reference that the run will need: found at the start, and not at the update that draws
    it. UserError names the first that hasn't."""
    for record in records:
        if cfg.rubric.source == "data" and (found := fixed_rubric(cfg.rubric, record)).value is None:
            what = f"has no rubric of the schema {cfg.rubric.schema}: {found.detail}"
            _refuse(record, what, "rubric.source, data.prompts", "a valid rubric in the column 'rubric' of every record")
        if cfg.judge.protocol == "likert_reference" and not record.get("reference", "").strip():
            where = "judge.protocol=likert_reference, data.prompts"
            _refuse(
                record, "has no reference", where, "a reference answer in every record ('FILE?reference=COLUMN' names its column)"
            )


def _refuse(record: Mapping[str, Any], what: str, where: str, expected: str) -> None:
    raise UserError(f"the prompt {record['id']!r} {what}", where=where, expected=expected)
