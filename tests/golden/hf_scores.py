"""Scores of a ...ForSequenceClassification folder by torch and transformers, for tests/test_export_reward.py.

python tests/golden/hf_scores.py FOLDER ROWS.json    # ROWS: lists of token ids; one JSON line: each row alone, then all padded
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import transformers


def main(folder: str, rows_file: str) -> None:
    rows = json.loads(pathlib.Path(rows_file).read_text())
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model, info = load(folder, dtype=torch.float32, output_loading_info=True)
    model = model.eval()
    pad, longest = model.config.pad_token_id, max(map(len, rows))
    padded = torch.asarray([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.asarray([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        alone = [float(model(torch.asarray([row])).logits[0, 0]) for row in rows]
        together = model(padded, attention_mask=mask).logits[:, 0].tolist()
    wrong = sorted(str(name) for names in info.values() for name in names)
    print(json.dumps({"alone": alone, "together": together, "wrong": wrong, "labels": model.config.num_labels}))


if __name__ == "__main__":
    main(*sys.argv[1:])
