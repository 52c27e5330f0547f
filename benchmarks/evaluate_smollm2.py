"""SmolLM2 as generator and judge on LLMBar, PandaLM, listwise rankings and InfoBench: no rubric against a prompted rubric.

    python benchmarks/evaluate_smollm2.py --shared=/path/to/shared/data --out=runs/evaluate_smollm2
        [--limit=N] [--only=llmbar,...] [--rubrics=none,...] [--generator=run:FOLDER] [--doc]

The judge reads each criterion's yes and no from the next-token probabilities (criterion_logits), so it has no noise. 'none' is
one criterion that asks for the whole; InfoBench also has the data's own criteria. The checking judges (oracle, always_a, random)
run on all of every file. The same command goes on where it stopped; --doc puts the table into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _results import machine  # noqa: E402

from coevo_jax.evaluate.__main__ import main as evaluate  # noqa: E402
from coevo_jax.evaluate.checking import CHECKS  # noqa: E402
from coevo_jax.evaluate.report import num, table  # noqa: E402

FILES = {
    "llmbar": "bench_preference/llmbar_visible.jsonl",
    "pandalm": "bench_preference/pandalm_visible.jsonl",
    "listwise": "listwise/vicuna80_5models.jsonl",
    "infobench": "rubrics/infobench.jsonl",
}
LIMITS = {"llmbar": 234, "pandalm": 100, "listwise": 20, "infobench": 40}  # examples, where --limit says nothing
GENERATORS = dict.fromkeys(FILES, ("none", "smollm2")) | {"infobench": ("none", "smollm2", "data")}
# Rows and prompts of a size that two cores and 8 GB bear.
SETTINGS = (
    "sampler.slots=8", "sampler.max_prompt=768", "sampler.max_new=160", "rubric_sampling.max_new_tokens=160",
    "judge.max_prompt=1536", "sampler.prefill_tokens=2048", "rubric.retry_temperatures=0.3",
)  # fmt: skip
BEGIN, END = "<!-- begin evaluate -->", "<!-- end evaluate -->"
EXTRA = {"pandalm": "annotator_agreement", "listwise": "kendall_tau", "infobench": "kappa", "llmbar": "longer_share"}


def run(flags: argparse.Namespace, name: str) -> int:
    """The benchmark's checks and systems; the exit code."""
    data, out = pathlib.Path(flags.shared) / FILES[name], pathlib.Path(flags.out)
    for check in CHECKS:
        if (out / name / check / "results.json").exists():
            continue
        done = evaluate([f"--benchmark={name}", f"--data={data}", f"--judge={check}", f"--out={out / name / check}"])
        if done:
            return done
    generators = (*(flags.rubrics.split(",") if flags.rubrics else GENERATORS[name]), *flags.generator)
    limit = flags.limit or LIMITS[name]
    words = [f"--benchmark={name}", f"--data={data}", "--judge=smollm2", f"--limit={limit}", "--batch=8"]
    for generator in generators:
        folder = out / name / ("smollm2_" + generator.rpartition("/")[2].replace("run:", ""))
        if done := evaluate([*words, f"--out={folder}", f"--generator={generator}", *(f"--config.{s}" for s in SETTINGS)]):
            return done
    return 0


def rows(out: pathlib.Path, only: list[str]) -> list[list[str]]:
    """The table's lines."""
    found = []
    for name in only:
        paths = [out / name / check / "results.json" for check in CHECKS]
        for path in [*paths, *sorted((out / name).glob("smollm2_*/results.json"))]:
            if path.exists():
                found += [_row(name, json.loads(path.read_text()), r) for r in json.loads(path.read_text())["results"]]
    return found


def _row(name: str, whole: dict[str, Any], r: dict[str, Any]) -> list[str]:
    low, high = r["interval"]
    written = sum(r["rubrics"].values())
    valid = f"{r['rubrics'].get('ok', 0)} of {written}" if written else ""
    extra = EXTRA[name]
    return [
        name, r["generator"], r["judge"], num(r["score"]), f"{num(low)} to {num(high)}", num(r["strict"]), num(r["tie_share"]),
        num(r["failure_share"]), valid, f"{extra} {num(r['parts'].get(extra))}", f"{r['n']} of {whole['examples'].split()[-1]}",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--only", default=",".join(FILES))
    parser.add_argument("--rubrics", default="", help="none,smollm2,data; '' = those of each benchmark")
    parser.add_argument("--generator", action="append", default=[], help="one more, such as run:FOLDER")
    parser.add_argument("--doc", action="store_true")
    flags = parser.parse_args()
    only, start = flags.only.split(","), time.monotonic()
    for name in only:
        if done := run(flags, name):
            return done
    header = [
        "benchmark",
        "rubric",
        "judge",
        "score",
        "95 %",
        "strict",
        "ties",
        "failures",
        "valid rubrics",
        "beside it",
        "examples",
    ]
    lines = table(header, rows(pathlib.Path(flags.out), list(FILES)))
    print("\n".join(lines))
    print(f"{machine()}; {(time.monotonic() - start) / 60:.1f} min in this process")
    if flags.doc:
        path = REPO / "docs" / "results.md"
        head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, _, tail = rest.partition(END)
        path.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + tail, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
