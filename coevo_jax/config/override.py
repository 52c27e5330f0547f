"""The frozen records by name: overrides from the command line, to and from dicts, printing, differences. Imports no JAX.

A key is the dotted path of a field, `schedule.k`. Its type is that of the record's annotation.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from coevo_jax.errors import UserError, nearest

Record = TypeVar("Record")


def apply_overrides(cfg: Record, overrides: Iterable[str]) -> Record:
    """`cfg` with each 'a.b=value' applied in order. UserError names the key, the expected type and the nearest valid key."""
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        kind = field_type(type(cfg), key)
        if not equals:
            raise UserError(f"the override {text!r} has no value", where=key, expected=f"{key}=VALUE, VALUE {_describe(kind)}")
        cfg = replace_at(cfg, key, parse_value(value, kind, key))
    return cfg


def record_types(record: type) -> dict[str, Any]:
    """Field name -> annotation as a type, in the record's order. One dict for all who ask: read it."""
    return _record_types(typing.cast(Any, record))


@functools.cache
def _record_types(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def key_types(record: type) -> dict[str, Any]:
    """Every dotted key that holds a value -> its type, in the order of the records. One dict for all who ask: read it."""
    return _key_types(typing.cast(Any, record))


@functools.cache
def _key_types(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in record_types(record).items():
        if dataclasses.is_dataclass(kind):
            found.update({f"{name}.{key}": inner for key, inner in key_types(typing.cast(type, kind)).items()})
        else:
            found[name] = kind
    return found


def field_type(record: type, key: str) -> Any:
    """The type of the value at `key`; UserError for an unknown key or a key that names a whole record."""
    keys = key_types(record)
    if key in keys:
        return keys[key]
    inside = [name for name in keys if name.startswith(key + ".")]
    if inside:
        raise UserError(f"{key} is a group of settings, not one", where=key, expected=f"one of {', '.join(inside)}")
    close = nearest_key(key, keys)
    raise UserError(f"unknown configuration key {key!r}", where=key, expected="a key of --print_config", nearest=close)


def nearest_key(key: str, keys: Iterable[str]) -> str:
    """The full dotted key that `key` most likely meant: one with the same last part, else the closest spelling."""
    keys = list(keys)
    same_leaf = [name for name in keys if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_leaf:
        return max(same_leaf, key=lambda name: difflib.SequenceMatcher(None, key, name).ratio())
    if "." in key:
        return nearest(key, keys)
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(keys)}
    return nearest(key, keys) or leaves.get(nearest(key, leaves), "")


def parse_value(text: str, kind: Any, key: str) -> Any:
    """`text` as a value of `kind`: int, float, bool (true | false), str (as it stands) or a tuple ('0.6,0.3'; '' is empty).

    A tuple of tuples has ';' between its members: '4,64;2,192'.
    """
    wrong = UserError(f"{text!r} is not a value of {key}", where=key, expected=_describe(kind))
    if kind is str:
        return text
    if typing.get_origin(kind) is tuple:
        return _parse_tuple(text, typing.get_args(kind), key, wrong)
    stripped = text.strip()
    if kind is bool:
        if stripped.lower() not in ("true", "false"):
            raise wrong
        return stripped.lower() == "true"
    try:
        value = kind(stripped)
    except ValueError:
        raise wrong from None
    if kind is float and not math.isfinite(value):
        raise wrong
    return value


def _parse_tuple(text: str, kinds: tuple[Any, ...], key: str, wrong: UserError) -> tuple[Any, ...]:
    body, mark, wrapped = text.strip(), ",", text.strip().startswith("(")
    if typing.get_origin(kinds[0]) is tuple:
        body, mark = re.sub(r"\)\s*,\s*(?=[()])", ");", body), ";"  # Python's own spelling serves too
        wrapped = body.startswith("((") or body == "()"
    if wrapped and body.endswith(")"):
        body = body[1:-1].strip()
    parts = [part.strip() for part in body.removesuffix(mark).split(mark)] if body else []
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(parts)
    if len(kinds) != len(parts):
        raise wrong
    try:
        return tuple(parse_value(part, kind, key) for part, kind in zip(parts, kinds))
    except UserError:
        raise wrong from None


def _describe(kind: Any) -> str:
    """The type in words, for error messages."""
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        if inner[-1] is not Ellipsis:
            return f"{len(inner)} values with commas between"
        if typing.get_origin(inner[0]) is tuple:
            return "groups of numbers with ';' between, such as 4,64;2,192"
        return f"{_describe(inner[0]).split(' ', 1)[-1]}s with commas between"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}.get(kind, str(kind))


def get_at(cfg: Any, key: str) -> Any:
    """The value at a dotted key."""
    return functools.reduce(getattr, key.split("."), cfg)


def replace_at(cfg: Record, key: str, value: Any) -> Record:
    """A copy of `cfg` with `value` at the dotted `key`."""
    head, _, rest = key.partition(".")
    if rest:
        value = replace_at(getattr(cfg, head), rest, value)
    return dataclasses.replace(typing.cast(Any, cfg), **{head: value})


def to_dict(cfg: Any) -> dict[str, Any]:
    """Nested plain dict of a record; tuples become lists, so that it equals what JSON gives back."""
    return {name: _plain(getattr(cfg, name)) for name in record_types(type(cfg))}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def to_json(cfg: Any) -> str:
    """The record as indented JSON, keys in the order of the records."""
    return json.dumps(to_dict(cfg), indent=2, ensure_ascii=False) + "\n"


def from_dict(record: type[Record], data: Mapping[str, Any], where: str = "config") -> Record:
    """The inverse of to_dict. Strict: an unknown key, a missing key or a value of another type is a UserError that names it."""
    return _from_dict(record, data, where, "")


def _from_dict(record: type[Record], data: Any, where: str, prefix: str) -> Record:
    if not isinstance(data, Mapping):
        raise UserError(f"{prefix.rstrip('.') or 'the config'} is not a group of settings", where=where, expected="a JSON object")
    kinds = record_types(record)
    for name in data:
        if name not in kinds:
            close = nearest(str(name), kinds)
            known = f"one of {', '.join(kinds)}"
            raise UserError(
                f"unknown key {prefix}{name}", where=where, expected=known, nearest=f"{prefix}{close}" if close else ""
            )
    for name in kinds:
        if name not in data:
            raise UserError(f"the key {prefix}{name} is missing", where=where, expected=_describe_field(kinds[name]))
    values: dict[str, Any] = {}
    for name, kind in kinds.items():
        if dataclasses.is_dataclass(kind):
            values[name] = _from_dict(typing.cast(type, kind), data[name], where, f"{prefix}{name}.")
        else:
            values[name] = conform(data[name], kind, f"{prefix}{name}", where)
    return record(**values)


def _describe_field(kind: Any) -> str:
    return "a group of settings" if dataclasses.is_dataclass(kind) else _describe(kind)


def conform(value: Any, kind: Any, key: str, where: str = "") -> Any:
    """`value` as an exact `kind`: a whole number serves as a float, a list as a tuple; anything else is a UserError."""
    wrong = UserError(f"{value!r} is not a value of {key}", where=where or key, expected=_describe(kind))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise wrong
        kinds = typing.get_args(kind)
        kinds = (kinds[0],) * len(value) if kinds[-1] is Ellipsis else kinds
        if len(kinds) != len(value):
            raise wrong
        return tuple(conform(item, inner, key, where) for item, inner in zip(value, kinds))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise wrong
    return value


def print_config(cfg: Any) -> str:
    """One line 'a.b=value' a setting, in the order of the records; each line is a valid override."""
    return "\n".join(f"{key}={_shown(get_at(cfg, key))}" for key in key_types(type(cfg)))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return str(value)
    return (";" if any(isinstance(item, tuple) for item in value) else ",").join(map(_shown, value))


def diff(a: Any, b: Any) -> list[str]:
    """Dotted keys on which two records of one type differ, in the order of the records."""
    return [key for key in key_types(type(a)) if get_at(a, key) != get_at(b, key)]
