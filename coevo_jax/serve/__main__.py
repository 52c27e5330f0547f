"""`python -m coevo_jax.serve score ...` (a file) and `... http ...` (an endpoint); exit code 2 for bad input. docs/serving.md"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from coevo_jax.errors import UserError, nearest
from coevo_jax.serve.limits import Limits

LOAD = ("generator", "judge", "policy", "config")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m coevo_jax.serve", allow_abbrev=False,
                                  description="Rubrics, scores and verdicts from a trained generator and a judge.")  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True)
    score = commands.add_parser("score", allow_abbrev=False, help="a file of questions and answers to a file of verdicts",
                                epilog="Stopped at any time, the same command goes on.")  # fmt: skip
    http = commands.add_parser("http", allow_abbrev=False, help="an OpenAI-style endpoint")
    for command in (score, http):
        command.add_argument("--generator", metavar="SOURCE", help="of rubrics: a model source, run:FOLDER, api:MODEL")
        command.add_argument("--judge", metavar="SOURCE", help="the same, or 'oracle'; left out: that of the run or config")
        command.add_argument(
            "--policy", metavar="SOURCE", help="that answers questions; left out: the run's, in single-model mode"
        )
        command.add_argument("--config", metavar="FILE", help="a config or a run folder, where no source is a run")
    score.add_argument(
        "--in", dest="input", required=True, metavar="FILE", help="JSONL or Parquet: id, question, answers (or a, b)"
    )
    score.add_argument("--out", required=True, metavar="FILE", help="a .jsonl file")
    score.add_argument("--seed", type=int, default=0, help="of the draws of rows without one (%(default)s)")
    score.add_argument("--batch", type=int, default=32, help="rows that are answered together (%(default)s)")
    score.add_argument("--overwrite", action="store_true", help="begin anew")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    http.add_argument(
        "--token_env", default="", metavar="NAME", help="environment variable that holds the bearer token, never the token"
    )
    http.add_argument("--access_log", action="store_true", help="a line a request, without its content")
    for field in dataclasses.fields(Limits):
        kind = int if field.type == "int" else float
        http.add_argument(f"--{field.name}", type=kind, default=field.default, metavar=str(field.type).upper(),
                          help="(%(default)s)")  # fmt: skip
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, 2 for bad input, 130 when stopped by Ctrl-C."""
    flags, rest = parser().parse_known_args(arguments)
    try:
        overrides = _overrides(rest)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # local files only; nothing is downloaded without saying so
        return score(flags, overrides) if flags.command == "score" else serve(flags, overrides)
    except UserError as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("stopped" + ("; the same command goes on" if flags.command == "score" else ""))
        return 130


def _overrides(rest: list[str]) -> list[str]:
    """--config.KEY=VALUE"""
    for word in rest:
        if not word.startswith("--config.") or "=" not in word:
            name = word.partition("=")[0]
            known = [f"--{n}" for n in (*LOAD, "in", "out", "seed", "batch", "host", "port", "token_env", *_limits())]
            raise UserError(f"unknown flag {word!r}", where="command line", expected="flags of --help, or --config.KEY=VALUE",
                            nearest=nearest(name, known))  # fmt: skip
    return [word.removeprefix("--config.") for word in rest]


def _limits() -> list[str]:
    return [field.name for field in dataclasses.fields(Limits)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load(flags: argparse.Namespace, overrides: list[str], compile: bool) -> Any:
    from coevo_jax.serve.library import load_system

    given = {name: getattr(flags, name) for name in LOAD[1:]}
    return load_system(flags.generator, overrides=overrides, compile=compile, stream=sys.stderr, **given)


# ---------------------------------------------------------------------------------------------------------------- score


def score(flags: argparse.Namespace, overrides: list[str]) -> int:
    """Answer a file. Bad rows are found before a model is loaded."""
    from coevo_jax.records.console import Console
    from coevo_jax.serve.batch import Counts, Output, read_asks, score_rows
    from coevo_jax.serve.settings import serving_settings

    if flags.batch < 1:
        raise UserError(f"--batch={flags.batch} is out of range", where="--batch", expected="at least 1")
    if os.path.realpath(flags.input) == os.path.realpath(flags.out):
        raise UserError("the output would be the input", where="--in, --out", expected="another --out")
    if not str(flags.out).endswith(".jsonl"):
        raise UserError(f"--out={flags.out} is no JSONL file", where="--out", expected="a name that ends in .jsonl")
    cfg, _ = serving_settings(flags.generator, flags.judge, flags.policy, flags.config, overrides)
    rows = read_asks(flags.input, cfg.rubric, flags.seed)
    system = _load(flags, overrides, compile=False)
    console = Console(sys.stderr)

    def progress(done: int, total: int, counts: Counts) -> None:
        console.step(done, {"failed": counts.failed, "refused": counts.refused})

    with Output(flags.out, system.identity(), flags.overwrite) as output:
        console.phase("rows", len(rows), len(rows) - len(output.check(rows)))
        counts = score_rows(system, rows, output, flags.batch, progress)
    system.close()
    console.line(
        f"{counts.done} rows done, {counts.before} before; {counts.failed} without a score, {counts.refused} refused: {flags.out}"
    )
    return 0


# ----------------------------------------------------------------------------------------------------------------- http


def serve(flags: argparse.Namespace, overrides: list[str]) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish what is under way. A second signal ends at once."""
    from coevo_jax.serve.server import Server, Service

    limits = Limits(**{name: getattr(flags, name) for name in _limits()})
    service = Service(limits, token_of(flags.token_env, os.environ), _say, flags.access_log)
    server = Server(flags.host, flags.port, service)
    if not server.local:
        _say("warning: other machines can reach this address, unencrypted" + ("; nobody needs a token" if service.open else ""))
    server.start()
    _say(f"listening on http://{flags.host}:{server.port}, loading")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while it loads, a signal ends it at once
    system = _load(flags, overrides, compile=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _stop(stop))
    service.begin(system)
    _say(f"ready: {', '.join(sorted(system.cast.speakers)) or 'no model of ours'}")
    stop.wait()
    _say("ending: no new requests")
    done = service.end()
    server.shutdown()
    system.close()
    _say("ended" if done else f"ended; requests were left after {limits.drain_s:g} s")
    return 0


def _stop(stop: threading.Event) -> None:
    if stop.is_set():
        os._exit(1)
    stop.set()


def token_of(name: str, environ: Any) -> str:
    """The token in an environment variable; '' where none is asked for. UserError: it isn't set, or can't be one."""
    if not name:
        return ""
    value = environ.get(name, "").strip()
    if not value:
        raise UserError(f"the environment variable {name} is not set", where="--token_env", expected="the token in it")
    if not (value.isascii() and value.isprintable() and " " not in value and len(value) >= 8):
        raise UserError(
            f"the value of {name} can't be a token", where="--token_env", expected="at least 8 printable ASCII characters"
        )
    return value


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of connections may still wait inside the runtime, and the interpreter's own end would trip over them
