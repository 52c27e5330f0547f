"""Procedural tasks of the package reasoning-gym as prompts with a verifier: 'reasoning_gym:TASK?size=2000&seed=1&max_terms=2'.

`size` (default 1000) and `seed` (default 0) belong to every task; other options go to the task's own config.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from coevo_jax.errors import UserError, nearest

PREFIX = "reasoning_gym:"


def generate(source: str, key: str = "") -> Iterator[dict[str, Any]]:
    """Records {id, prompt, reference, metadata, task} of a task; the same for the same source on every machine."""
    dataset = _dataset(source, key)
    task = source.removeprefix(PREFIX).partition("?")[0]
    seed = dataset.config.seed
    for number in range(dataset.size):
        item = dataset[number]
        record = {"id": f"{task}-{seed}-{number}", "prompt": item["question"], "metadata": item["metadata"], "task": source}
        # Some tasks have many right answers and name none.
        yield record if item["answer"] is None else {**record, "reference": str(item["answer"])}


def score_answer(record: Mapping[str, Any], answer: str) -> float:
    """The task's own score of an answer to `record`, in [0, 1]. The answer alone, without reasoning around it."""
    entry = {"question": record["prompt"], "answer": record.get("reference"), "metadata": record["metadata"]}
    return float(_dataset(record["task"]).score_answer(answer=answer, entry=entry))


@functools.lru_cache(maxsize=32)
def _dataset(source: str, key: str = "") -> Any:
    where = f"{key}={source}" if key else source
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            "the package reasoning-gym is not installed", where=where, expected="pip install 'coevo-jax[eval]'"
        ) from None
    task, _, query = source.removeprefix(PREFIX).partition("?")
    if task not in DATASETS:
        close = nearest(task, DATASETS)
        raise UserError(
            f"reasoning-gym has no task {task!r}",
            where=where,
            expected="a task of reasoning-gym",
            nearest=close and PREFIX + close,
        )
    options = {"size": 1000, "seed": 0} | _options(query, where)
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in options:
        if name not in known:
            raise UserError(
                f"the task {task} has no option {name!r}", where=where, expected=", ".join(known), nearest=nearest(name, known)
            )
    try:
        return reasoning_gym.create_dataset(task, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"the task {task} refuses its options: {error}", where=where, expected=", ".join(known)) from None


def _options(query: str, where: str) -> dict[str, Any]:
    """'size=10&flag=true' as values: JSON where it is JSON, else a text."""
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise UserError(f"{part!r} is no option", where=where, expected="name=value, with & between")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    for name in ("size", "seed"):
        if name in options and (type(options[name]) is not int or options[name] < (1 if name == "size" else 0)):
            raise UserError(
                f"{name}={options[name]!r}", where=where, expected="a whole number" + (" of at least 1" if name == "size" else "")
            )
    return options
