"""The report as one HTML file: data embedded, no network, no server; a policy in the page lets nothing but its own script run.

Text of models is hostile (design.md 4.11): data is JSON in which '<' is escaped, or compressed and in base64; the script shows
it as text only.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from coevo_jax.report.collect import Question, RunData
from coevo_jax.report.criteria import criteria_of

ASSETS = pathlib.Path(__file__).parent / "assets"


def page(runs: Sequence[RunData], title: str, refresh_s: int = 0) -> str:
    """The whole page. refresh_s: seconds after which it reads itself again, 0 for never."""
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    blocks = [_block("data", [_described(run) for run in runs])]
    for number, run in enumerate(runs):
        blocks += [_packed(f"q-{number}-{i}", _rows(question)) for i, question in enumerate(run.questions)]
    slots = {
        "{{POLICY}}": policy, "{{TITLE}}": _text(title), "{{STYLE}}": style, "{{SCRIPT}}": script, "{{DATA}}": "\n".join(blocks),
        "{{REFRESH}}": f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else "",
    }  # fmt: skip
    out = (ASSETS / "report.html").read_text(encoding="utf-8")
    for slot in (
        "{{POLICY}}",
        "{{TITLE}}",
        "{{REFRESH}}",
        "{{STYLE}}",
        "{{SCRIPT}}",
        "{{DATA}}",
    ):  # data last: it may name a slot
        head, tail = out.split(slot, 1)
        out = head + slots[slot] + tail
    return out


def _described(run: RunData) -> dict[str, Any]:
    """A run without its rows; of each question what the list shows and filters by."""
    return {
        "name": run.name, "folder": run.folder, "config": run.config, "steps": run.steps, "columns": run.columns,
        "phases": [dataclasses.asdict(phase) for phase in run.phases], "alarms": run.alarms, "all_questions": run.all_questions,
        "all_rows": run.all_rows, "rows": run.rows, "questions": [_entry(question) for question in run.questions],
    }  # fmt: skip


def _entry(question: Question) -> dict[str, Any]:
    rewards = [row["reward"] for row in question.rows if row.get("reward") is not None]
    return {
        "text": question.text, "record": question.record, "flags": question.flags, "rows": len(question.rows),
        "updates": sorted({row["update"] for row in question.rows}), "high": max(rewards, default=None),
        "low": min(rewards, default=None),
    }  # fmt: skip


def _rows(question: Question) -> list[dict[str, Any]]:
    return [{**row, "criteria": criteria_of(row)} for row in question.rows]


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _block(name: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>'


def _packed(name: str, value: Any) -> str:
    raw = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    return f'<script type="text/plain" id="{name}">{base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()}</script>'


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
