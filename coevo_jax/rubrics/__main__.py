"""`python -m coevo_jax.rubrics --input FILE --output FILE --source MODEL [...]`: RRD rubrics; exit code 2 for bad input."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
from collections.abc import Sequence

from coevo_jax.config import EndpointConfig, SamplerConfig, Sampling, api_model
from coevo_jax.data.readers import read_rows
from coevo_jax.errors import UserError
from coevo_jax.records.files import dumps, write_atomic
from coevo_jax.rubrics import rrd_build
from coevo_jax.rubrics.cache import RubricFolder

BATCH = 64  # questions that are refined together; what is done of them is kept


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m coevo_jax.rubrics", description=rrd_build.__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    out.add_argument("--input", required=True, metavar="FILE", help="JSONL or Parquet with prompt, samples, strong, weak")
    out.add_argument("--output", required=True, metavar="FILE", help="a .jsonl file, written whole at the end")
    out.add_argument("--cache", default="rrd_cache", metavar="DIR", help="where rubrics are kept (%(default)s)")
    out.add_argument("--weights", default="whitened", help=" | ".join(rrd_build.WEIGHTS))
    out.add_argument("--source", required=True, help="api:MODEL, or smollm2, a folder, a .gguf file")
    out.add_argument("--base_url", default="", help="of an api:MODEL")
    out.add_argument("--key_env", default="", help="environment variable that holds the key, never the key")
    out.add_argument("--temperature", type=float, default=0.6)
    out.add_argument("--max_new_tokens", type=int, default=1024)
    out.add_argument("--max_prompt", type=int, default=8192, help="tokens of the longest prompt, for a model of ours")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    flags = parser().parse_args(arguments)
    try:
        return _main(flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with what is in {flags.cache}", file=sys.stderr)
        return 130


def _main(flags: argparse.Namespace) -> int:
    rows = list(read_rows(flags.input))
    for place, row in rows:
        rrd_build.check_record(row, place)
    sampling = Sampling(temperature=flags.temperature, top_p=0.95, max_new_tokens=flags.max_new_tokens)
    model = f"{flags.source} {sampling}"
    folder = RubricFolder(flags.cache)
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        builder = rrd_build.Builder(_asker(flags, sampling, stack), folder, model, flags.weights)
        for start in range(0, len(rows), BATCH):
            batch = [row for _, row in rows[start : start + BATCH]]
            for row, rubric in zip(batch, builder.build(batch)):
                lines += [dumps({**row, "rubric": rubric})] if rubric else []
            print(f"{min(start + BATCH, len(rows))}/{len(rows)} questions", file=sys.stderr)
    output = pathlib.Path(flags.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, "".join(line + "\n" for line in lines))
    print(f"{len(lines)} of {len(rows)} questions have a rubric, in {flags.output}; "
          + ", ".join(f"{name} {n}" for name, n in sorted(builder.counts.items())))  # fmt: skip
    return 0


def _asker(flags: argparse.Namespace, sampling: Sampling, stack: contextlib.ExitStack) -> rrd_build.Asker:
    if name := api_model(flags.source):
        if not flags.base_url:
            raise UserError(
                "--source=api:MODEL needs an address", where="--base_url", expected="such as https://api.openai.com/v1"
            )
        from coevo_jax.remote import Endpoint

        endpoint = Endpoint("rrd", name, EndpointConfig(base_url=flags.base_url, key_env=flags.key_env, cache="off"), os.environ)
        stack.callback(endpoint.close)
        return rrd_build.endpoint_asker(endpoint, sampling)
    from coevo_jax.models.load import load_model
    from coevo_jax.sampler import Engine
    from coevo_jax.text.chat import ChatTokenizer

    loaded = load_model(flags.source)
    tokenizer = ChatTokenizer.load(loaded.folder)
    cfg = SamplerConfig(max_prompt=flags.max_prompt, max_new=flags.max_new_tokens)
    return rrd_build.engine_asker(Engine(loaded.spec, cfg, tokenizer.stop_ids), loaded.params, tokenizer, sampling)


if __name__ == "__main__":
    sys.exit(main())
