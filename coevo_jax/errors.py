"""The one error style: what was wrong, where, what was expected, the nearest valid choice.

`UserError` is for input a person can mend (files, flags, configs, data). run.py and the command-line tools print its text
without a traceback and exit with code 2. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """Bad input. `what` happened, `where` (file, line, record, config key), what was `expected`, the `nearest` valid choice."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", expected: str = "", nearest: str = ""):
        self.what, self.where, self.expected, self.nearest = what, where, expected, nearest
        lines = [what]
        if where:
            lines.append(f"  where:    {where}")
        if expected:
            lines.append(f"  expected: {expected}")
        if nearest:
            lines.append(f"  nearest:  {nearest}")
        super().__init__("\n".join(lines))


class MissingProcesses(UserError):
    """The other processes did not come: nothing a person must mend, the same command may go on (sysexits' EX_TEMPFAIL)."""

    exit_code = 75


def nearest(name: str, choices: Iterable[str]) -> str:
    """The valid choice closest in spelling to `name`, or '' when none is close."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return found[0] if found else ""


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's flags, for app.run(flags_parser=...): bad ones end the program with code 2, as all bad input does."""
    from absl import flags

    try:
        return flags.FLAGS(list(argv))  # type: ignore[no-any-return]
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
