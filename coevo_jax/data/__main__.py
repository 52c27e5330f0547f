"""`python -m coevo_jax.data prepare --input FILE... --output prompts.jsonl [...]`; exit code 2 for bad input."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from coevo_jax.data.prepare import BENCHMARK_COLUMNS, COLUMNS, Options, manifest_of, prepare
from coevo_jax.errors import UserError
from coevo_jax.text.chat import ChatTokenizer

TOKENIZER = "the policy's, for the lengths: its source, such as smollm2, a folder or a .gguf file"


def parser() -> argparse.ArgumentParser:
    """The command line; one sub-command."""
    top = argparse.ArgumentParser(prog="python -m coevo_jax.data", description="Data tools.", allow_abbrev=False)
    command = top.add_subparsers(dest="command", required=True).add_parser(
        "prepare", help="make a prompt file from local files", description=prepare.__doc__, allow_abbrev=False
    )
    command.add_argument("--input", nargs="+", action="extend", required=True, metavar="FILE", help="JSONL or Parquet")
    command.add_argument("--output", required=True, metavar="FILE", help="a .jsonl file; its manifest is written beside it")
    command.add_argument("--column", default="", help=f"of the prompt, a text or a list of messages (else {', '.join(COLUMNS)})")
    command.add_argument("--tokenizer", default="", metavar="SOURCE", help=TOKENIZER)
    command.add_argument("--max_tokens", type=int, default=0, help="longest prompt, chat template included (0 = no limit)")
    command.add_argument("--min_tokens", type=int, default=0, help="shortest prompt, chat template included")
    command.add_argument(
        "--benchmark", nargs="+", action="extend", default=[], metavar="FILE", help="whose questions are left out"
    )
    command.add_argument("--benchmark_column", default="", help=f"(else the first of {', '.join(BENCHMARK_COLUMNS)})")
    command.add_argument("--ngram", type=int, default=13, help="words in a row that count as overlap (%(default)s)")
    command.add_argument("--keep", nargs="+", action="extend", default=[], metavar="COLUMN", help="other columns to carry over")
    command.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    flags = parser().parse_args(arguments)
    values: dict[str, Any] = {field.name: getattr(flags, field.name, None) for field in dataclasses.fields(Options)}
    values |= {"inputs": tuple(flags.input), "benchmarks": tuple(flags.benchmark), "keep": tuple(flags.keep)}
    try:
        manifest = prepare(Options(**values), load=_tokenizer)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    print(f"{manifest['output']['prompts']:,} prompts in {flags.output} (sha256 {manifest['output']['sha256']})")
    print(f"counts and hashes in {manifest_of(flags.output)}")
    return 0


def _tokenizer(source: str) -> ChatTokenizer:
    from coevo_jax.models.load import tokenizer_folder  # this program may look up to the models; the data room may not

    return ChatTokenizer.load(tokenizer_folder(source))


if __name__ == "__main__":
    sys.exit(main())
