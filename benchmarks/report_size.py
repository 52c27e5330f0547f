"""A report of a long run: file size, time and memory to write it, and how long Chromium takes to open it.

    python benchmarks/report_size.py --json                     # 1,000 updates x 64 prompts x 8 samples, about 1.2 GB of rollouts
    python benchmarks/report_size.py --updates=100 --prompts=8  # small

The run is synthetic: metrics and rollouts of the form that train.py writes, with words for texts. Opening is measured only where
the extra 'browser' and Chromium are there: from navigation to the first drawn curves, then one question's rows.
"""

from __future__ import annotations

import json
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

UPDATES = flags.DEFINE_integer("updates", 1000, "updates of the run", lower_bound=4)
PROMPTS = flags.DEFINE_integer("prompts", 64, "prompt slots", lower_bound=1)
GROUP = flags.DEFINE_integer("group", 8, "samples a prompt", lower_bound=1)
QUESTIONS = flags.DEFINE_integer("questions", 4000, "different questions", lower_bound=1)
WORDS = flags.DEFINE_integer("words", 120, "words of a completion", lower_bound=1)
JSON = flags.DEFINE_bool("json", False, "one JSON object as the last line")

K = 50  # updates of a phase
METRICS = 110
VOCABULARY = [
    f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "ru", "so", "ti", "va", "we", "zu") for b in ("rin", "del", "pas", "tom", "gel")
]
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(VOCABULARY, k=count))


def write_run(folder: pathlib.Path) -> int:
    """A run folder; returns the bytes of its rollouts."""
    rng = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": "synthetic"}))
    names = [f"reward/part_{i}/mean" if i < 20 else f"time/part_{i}" if i < 40 else f"other/metric_{i}" for i in range(METRICS)]
    questions = [words(rng, 25) for _ in range(QUESTIONS.value)]
    size = 0
    with (folder / "metrics.jsonl").open("w") as metrics:
        for update in range(UPDATES.value):
            phase = update // K
            role = "rubric" if phase % 2 else "policy"
            row: dict[str, Any] = {"step": update, "cycle": phase // 2, "stage": role, "role": role, "reward/mean": rng.random()}
            metrics.write(json.dumps(row | {name: rng.random() for name in names}) + "\n")
            text = "".join(json.dumps(r) + "\n" for r in rollouts(rng, update, role, questions))
            size += len(text)
            (folder / "rollouts" / f"update_{update:06d}_{role}.jsonl").write_text(text)
    return size


def rollouts(rng: random.Random, update: int, role: str, questions: list[str]) -> list[dict[str, Any]]:
    """One update's rows."""
    out = []
    for slot in range(PROMPTS.value):
        number = rng.randrange(len(questions))
        criteria = [{"criterion": words(rng, 8), "weight": 0.25} for _ in range(4)]
        rubric = "\n".join(f"{i + 1}. (weight 0.25) {c['criterion']}" for i, c in enumerate(criteria))
        for sample in range(GROUP.value):
            verdict = {
                "status": "ok" if rng.random() > 0.02 else "parse_fail",
                "score": rng.random(),
                "raw": words(rng, 40),
                "parts": [0.5] * 4,
            }
            row: dict[str, Any] = {
                "update": update, "cycle": 0, "role": role, "slot": slot, "group": slot, "sample": sample, "record": f"r{number}",
                "question": questions[number], "prompt": questions[number], "completion_ids": list(range(150)), "finish": "stop",
                "reward": rng.random(), "parts": {"judge": 0.5}, "advantage": rng.random() - 0.5, "trained": True,
            }  # fmt: skip
            if role == "rubric":
                row |= {
                    "completion": json.dumps({"criteria": criteria}),
                    "rubric_status": "ok",
                    "judge_accepted": verdict,
                    "judge_rejected": verdict,
                }
            else:
                row |= {"completion": words(rng, WORDS.value), "rubric": rubric, "judge": verdict}
            out.append(row)
    return out


def opening(path: pathlib.Path) -> dict[str, float]:
    """Seconds until Chromium has drawn the overview, and until a question's rows stand there; bytes of script memory."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    if binary is None:
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=CHROMIUM_FLAGS)
        page = browser.new_page()
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("svg path.k0", state="attached")
        drawn = time.perf_counter() - start
        page.click("#tab-browse")
        start = time.perf_counter()
        page.click("#questions button[data-question] >> nth=0")
        page.wait_for_selector(".row:visible")
        picked = time.perf_counter() - start
        start = time.perf_counter()
        page.click("#tab-curves")
        page.wait_for_selector("#smooth")
        curves = time.perf_counter() - start
        heap = page.evaluate("performance.memory ? performance.memory.usedJSHeapSize : 0")
        browser.close()
    return {"open_s": drawn, "question_s": picked, "curves_s": curves, "script_heap_mb": heap / 1e6}


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "run"
        rollout_bytes = write_run(folder)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "coevo_jax.report", str(folder)], check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        out = folder / "report.html"
        result = {
            "updates": UPDATES.value, "rows": UPDATES.value * PROMPTS.value * GROUP.value, "rollouts_mb": rollout_bytes / 1e6,
            "report_mb": out.stat().st_size / 1e6, "write_s": seconds,
            "write_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, **opening(out),
        }  # fmt: skip
    for name, value in result.items():
        print(f"{name:16} {value:,.2f}")
    if JSON.value:
        print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
