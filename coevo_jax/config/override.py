"""The frozen records by name: overrides from the command line, to and from dicts, printing, differences. Imports no JAX.

A key is the dotted path of a field, `schedule.k`. Its type is that of the record's annotation. A list of records has numbered
keys, `panel.judges.0.source`; naming the first number that is free appends a record.
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
        parsed = parse_value(value, kind, key)
        try:
            cfg = replace_at(cfg, key, parsed)
        except UserError as error:
            raise UserError(error.what, where=key, expected=error.expected) from error
    return cfg


def record_types(record: type) -> dict[str, Any]:
    """Field name -> annotation as a type, in the record's order."""
    return _record_types(typing.cast(Any, record))


@functools.cache
def _record_types(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def item_record(kind: Any) -> type | None:
    """The record that a list of records holds; None for every other type."""
    inner = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
    return typing.cast(type, inner) if dataclasses.is_dataclass(inner) else None


def key_types(record: Any, example: bool = False) -> dict[str, Any]:
    """Every dotted key that holds a value -> its type, in the order of the records. record: one, or its class, whose lists of
    records have no items; `example`: they have one then."""
    found: dict[str, Any] = {}
    whole = isinstance(record, type)
    for name, kind in record_types(record if whole else type(record)).items():
        if (item := item_record(kind)) is not None:
            items = [item] * example if whole else getattr(record, name)
            inside = {str(i): own for i, own in enumerate(items)}
        elif dataclasses.is_dataclass(kind):
            inside = {"": kind if whole else getattr(record, name)}
        else:
            found[name] = kind
            continue
        for number, own in inside.items():
            prefix = f"{name}.{number}." if number else f"{name}."
            found.update({prefix + key: inner for key, inner in key_types(own, example).items()})
    return found


@functools.cache
def _example_keys(record: Any) -> dict[str, Any]:
    return key_types(record, example=True)


def field_type(record: type, key: str) -> Any:
    """The type of the value at `key`; UserError for an unknown key or a key that names a whole record."""
    keys = _example_keys(typing.cast(Any, record))
    first = re.sub(r"\.\d+(?=\.)", ".0", key)  # all items of a list are alike
    if first in keys:
        return keys[first]
    inside = [name for name in keys if name.startswith(first + ".")]
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
    return functools.reduce(lambda at, name: at[int(name)] if isinstance(at, tuple) else getattr(at, name), key.split("."), cfg)


def replace_at(cfg: Record, key: str, value: Any) -> Record:
    """A copy of `cfg` with `value` at the dotted `key`. UserError for a list's number that skips others."""
    head, _, rest = key.partition(".")
    if rest and (item := item_record(record_types(type(cfg))[head])) is not None:
        value = _replace_item(getattr(cfg, head), item, rest, value, head)
    elif rest:
        value = replace_at(getattr(cfg, head), rest, value)
    return dataclasses.replace(typing.cast(Any, cfg), **{head: value})


def _replace_item(items: tuple[Any, ...], item: type, key: str, value: Any, name: str) -> tuple[Any, ...]:
    number, _, rest = key.partition(".")
    index = int(number)
    if index > len(items):
        raise UserError(
            f"{name}.{index} skips {name}.{len(items)}", where=f"{name}.{key}", expected=f"{name}.{len(items)}.{rest}"
        )
    grown = (*items, item()) if index == len(items) else items
    return (*grown[:index], replace_at(grown[index], rest, value), *grown[index + 1 :])


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
        elif (item := item_record(kind)) is not None:
            values[name] = _from_list(item, data[name], where, f"{prefix}{name}")
        else:
            values[name] = conform(data[name], kind, f"{prefix}{name}", where)
    return record(**values)


def _from_list(item: type, data: Any, where: str, key: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise UserError(f"{key} is not a list", where=where, expected="a list of groups of settings")
    return tuple(_from_dict(item, own, where, f"{key}.{i}.") for i, own in enumerate(data))


def _describe_field(kind: Any) -> str:
    if item_record(kind) is not None:
        return "a list of groups of settings"
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
    return "\n".join(f"{key}={_shown(get_at(cfg, key))}" for key in key_types(cfg))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return str(value)
    return (";" if any(isinstance(item, tuple) for item in value) else ",").join(map(_shown, value))


def diff(a: Any, b: Any) -> list[str]:
    """Dotted keys on which two records of one type differ, in the order of the records."""
    values = [{key: get_at(record, key) for key in key_types(record)} for record in (a, b)]
    absent = object()  # of an item that one list has
    return [key for key in {**values[0], **values[1]} if values[0].get(key, absent) != values[1].get(key, absent)]
