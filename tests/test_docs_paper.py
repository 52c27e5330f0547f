"""docs/paper.md against the configs: its tables are what --print_config prints, and every config has its rows."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from train_support import REPO

from coevo_jax.config import CompatConfig, Experiment
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides, field_type, key_types, parse_value, print_config

DOC = REPO / "docs" / "paper.md"
MAIN = "configs/evolm/qwen3_8b.py"
PLACE = re.compile(r"(§\d|Table \d|Eq\. \d|App\. [A-D])")
# Configs of the paper, its ablations and its baselines, but the main one and those of other papers.
CONFIGS = sorted(
    str(path.relative_to(REPO))
    for folder in ("evolm", "ablations", "baselines")
    for path in (REPO / "configs" / folder).rglob("*.py")
    if not path.name.startswith(("_", "dynamic", "arm", "rubric_arm")) and str(path.relative_to(REPO)) != MAIN
)

# Items of these lists are compared with the main config's own record.
ITEMS = {"panel.judges": "judge", "policies": "policy", "pairs.frozen_models": "policy"}
ITEM = re.compile(rf"({'|'.join(map(re.escape, ITEMS))})\.\d+\.(.+)")

Row = tuple[str, ...]


@functools.cache
def table(text: str, name: str) -> list[Row]:
    """The rows between the markers of a table, cells without backticks."""
    inside = text.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]
    lines = [line for line in inside.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip().strip("`").replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]


@functools.cache
def config(path: str) -> Experiment:
    return load_config(str(REPO / path))


@functools.cache
def printed(cfg: Experiment) -> dict[str, str]:
    """Key -> value as --print_config has them."""
    return dict(line.split("=", 1) for line in print_config(cfg).splitlines())


def diff(main: Experiment, cfg: Experiment) -> list[str]:
    """Keys that a config prints otherwise than the main one; of an added item its source, and what the main record has not."""
    before, after = printed(main), printed(cfg)
    changed = []
    for key in {**before, **after}:
        item = ITEM.fullmatch(key)
        if item and item[2] != "source" and after.get(key) == before[f"{ITEMS[item[1]]}.{item[2]}"]:
            continue
        if before.get(key) != after.get(key):
            changed.append(key)
    return changed


def differs(cfg: Experiment, key: str, value: str) -> bool:
    """Is the config's value another one? Of a path the last part counts."""
    kind, now = field_type(Experiment, key), printed(cfg)[key]
    if key.endswith(".source"):
        return pathlib.PurePath(now).name != pathlib.PurePath(value).name
    return bool(parse_value(now, kind, key) != parse_value(value, kind, key))


def wrong_settings(text: str, main: Experiment) -> list[str]:
    """Keys of the settings whose value is not the config's, and of the departures whose own is not."""
    settings = [(key, value) for key, value, _ in table(text, "settings")]
    departures = [(key, ours) for key, _, ours, _ in table(text, "departures")]
    return [key for key, value in (*settings, *departures) if differs(main, key, value)]


def wrong_changes(text: str, main: Experiment, path: str, cfg: Experiment) -> list[str]:
    """Keys that a config changes without a row, rows of keys that it does not change, and rows of another value."""
    rows = {key: value for name, key, value, _ in table(text, "changes") if name == path}
    changed = [key for key in diff(main, cfg) if key != "name"]
    return [*(set(changed) ^ set(rows)), *(key for key in changed if key in rows and differs(cfg, key, rows[key]))]


TEXT = DOC.read_text(encoding="utf-8")


def test_the_settings_are_those_of_the_main_config() -> None:
    assert wrong_settings(TEXT, config(MAIN)) == []
    rows = table(TEXT, "settings")
    assert len(rows) > 30 and all(PLACE.search(where) for *_, where in rows)


@pytest.mark.parametrize("key, value", [(key, value) for key, value, _ in table(TEXT, "settings")])
def test_a_config_that_changes_a_setting_of_the_paper_is_found(key: str, value: str) -> None:
    kind = field_type(Experiment, key)
    other = {bool: str(value == "false").lower(), str: f"{value}_2"}.get(kind, "") or str(kind(float(value)) * 2 + 1)
    assert wrong_settings(TEXT, apply_overrides(config(MAIN), [f"{key}={other}"])) == [key]


def test_a_table_that_says_something_else_is_found() -> None:
    for name, before, after in (
        ("settings", "| `schedule.k` | `50` |", "| `schedule.k` | `51` |"),
        ("departures", "| `0.0` | `0.6` |", "| `0.0` | `0.5` |"),
    ):
        assert before in TEXT, name
        assert len(wrong_settings(TEXT.replace(before, after), config(MAIN))) == 1


def test_departures_are_departures() -> None:
    rows = table(TEXT, "departures")
    assert rows and all(theirs != ours and PLACE.search(why) for _, theirs, ours, why in rows)


def matches(key: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if key == name or (name.endswith("*") and key.startswith(name[:-1]))]


def test_every_key_that_the_main_config_sets_stands_in_one_table() -> None:
    names = [row[0] for part in ("settings", "departures", "ours") for row in table(TEXT, part)]
    exact = [name for name in names if not name.endswith("*")]
    assert len(set(exact)) == len(exact)
    for key in diff(Experiment(), config(MAIN)):
        assert key == "name" or matches(key, names), key
    for name in names:  # and none is of a key that does not exist
        assert matches(name, printed(config(MAIN))) or name.endswith("*"), name


@pytest.mark.parametrize("path", CONFIGS)
def test_what_a_config_changes_has_its_rows(path: str) -> None:
    now = printed(config(path))
    lines = [
        f"| `{path}` | `{key}` | `{now[key]}` | §..., Table ... or ours: ... |"
        for key in diff(config(MAIN), config(path))
        if key != "name"
    ]
    wrong = wrong_changes(TEXT, config(MAIN), path, config(path))
    assert wrong == [], "docs/paper.md should have these rows:\n" + "\n".join(lines)
    rows = [row for row in table(TEXT, "changes") if row[0] == path]
    assert all(PLACE.search(where) or "ours:" in where for *_, where in rows)


def test_a_changed_config_a_changed_main_config_and_a_changed_row_are_found() -> None:
    main, path = config(MAIN), "configs/ablations/gap_5_20.py"
    cfg = config(path)
    assert wrong_changes(TEXT, main, path, apply_overrides(cfg, ["pairs.min_gap=6"])) == ["pairs.min_gap"]
    assert wrong_changes(TEXT, main, path, apply_overrides(cfg, ["loss.clip_low=0.25"])) == ["loss.clip_low"]
    assert wrong_changes(TEXT, main, path, apply_overrides(cfg, ["pairs.max_gap=100"])) == ["pairs.max_gap"]
    assert wrong_changes(TEXT, apply_overrides(main, ["loss.clip_low=0.25"]), path, cfg) == ["loss.clip_low"]
    row = "| `configs/ablations/gap_5_20.py` | `pairs.min_gap` | `5` |"
    assert row in TEXT and wrong_changes(TEXT.replace(row, row.replace("5` |", "7` |")), main, path, cfg) == ["pairs.min_gap"]


def test_rows_are_of_configs_that_exist() -> None:
    assert {row[0] for row in table(TEXT, "changes")} == set(CONFIGS)
    results = [row[0] for row in table(TEXT, "results")]
    assert set(results) <= {MAIN, *CONFIGS} and len(set(results)) == len(results)


# Table 2 of the paper by config; "-": it has none.
MAIN_TABLE = {
    "baselines/gpt41_prompted": ("36.6", "41.3", "66.7"), "baselines/qwen3_8b_prompted": ("26.2", "36.6", "67.5"),
    "baselines/skywork_rm": ("86.4", "80.8", "59.7"), "baselines/rar_gpt41": ("-", "-", "67.5"),
    "baselines/rrd_whitened": ("-", "-", "67.6"), "baselines/rlcer_evolving": ("45.0", "49.2", "66.7"),
    "baselines/sequential_iq": ("47.2", "48.6", "68.0"), "baselines/sequential_rc": ("46.0", "42.2", "68.3"),
    "evolm/qwen3_8b": ("46.0", "44.4", "69.3"),
}  # fmt: skip


def test_every_row_of_the_main_table_has_a_config_or_is_said_to_have_none() -> None:
    results = {row[0]: row[1:4] for row in table(TEXT, "results")}
    for name, numbers in MAIN_TABLE.items():
        assert results[f"configs/{name}.py"] == numbers, name
    assert "Rubric-ARM's published generator and judge, frozen: 56.1, 51.5, 67.5" in TEXT
    kinds = {"k": 4, "gap": 2, "reward": 3, "signal": 4, "roles": 2, "transfer": 4}  # rows of Tables 15, 16, 18, 20, 21 and 4
    found = [pathlib.Path(name).stem.split("_")[0] for name in results if "ablations" in name]
    assert {kind: found.count(kind) for kind in kinds} == kinds
    assert sum(name.startswith("configs/evolm/judge_") for name in results) == 5  # Table 19, but for the main row


NUMBERS = {1: r"RewardBench 2 (\d+\.\d)", 2: r"JudgeBench (\d+\.\d)", 3: r"12-task average (\d+\.\d)"}


def test_the_docstrings_of_configs_have_the_numbers_of_the_table() -> None:
    found = 0
    for row in table(TEXT, "results"):
        doc = (REPO / row[0]).read_text(encoding="utf-8").split('"""')[1]
        for column, pattern in NUMBERS.items():
            for number in re.findall(pattern, re.sub(r"\s+", " ", doc)):
                assert number == row[column], (row[0], pattern)
                found += 1
    assert found > 15


def test_every_switch_of_compat_is_told() -> None:
    told = TEXT.split("## Where the released code differs")[1]
    for field in dataclasses.fields(CompatConfig):
        assert f"`compat.{field.name}=" in told, field.name
    switches = re.findall(r"`([a-z_]+\.[a-z_.]+)=([^`.]*[^`]*)`", told)
    for key, value in switches:
        if value != "...":
            apply_overrides(Experiment(), [f"{key}={value}"])
    assert len(switches) > 10


def paths(text: str) -> Sequence[str]:
    return re.findall(r"`((?:configs|coevo_jax|tests|docs)/[\w/.]*)`", text)


def test_every_file_that_it_names_exists() -> None:
    named = paths(TEXT)
    assert len(named) > 100
    missing: list[Any] = [name for name in named if not (REPO / name).exists()]
    assert not missing


def test_keys_that_it_names_exist() -> None:
    known = [re.sub(r"\.0\.", ".", key) for key in key_types(Experiment, example=True)]
    for key in re.findall(r"`([a-z_]+\.[a-z_]+(?:\.[a-z_]+)*)`", TEXT):
        if key.split(".")[0] in {name.split(".")[0] for name in known if "." in name}:
            assert key in known or any(name.startswith(f"{key}.") for name in known), key
