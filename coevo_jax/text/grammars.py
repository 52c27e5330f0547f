"""What guided sampling lets a model write: Lark grammars of rubrics and of judges' verdicts (rubrics and text.parse read them).

One spelling only: the separators are those of the forms shown in text/prompts (", " and ": "), keys come in one order, numbers
have at most two decimals and texts a longest length, so that a short token limit holds a whole object. What a schema of JSON
can't say is said here: the weights of a rubric add up to 1 exactly.
"""

from __future__ import annotations

from coevo_jax.config import RubricConfig
from coevo_jax.errors import UserError

# Inside a JSON string: no control characters and no tags, which would open or close a reasoning block or a turn.
_CHAR = r'(?:[^"\\<\p{Cc}]|\\"|<[ =0-9])'
_SCORE = r"(?:0(?:\.[0-9]{1,2})?|1(?:\.0)?)"
_BETWEEN = (r"0\.75", r"0\.5", r"0\.25")  # levels that a criterion may leave out
LEAD = '" "?'  # the space that many tokenizers put in front of a first word
MOST_CRITERIA = 20  # of a rubric whose config sets no limit


def text_regex(most: int) -> str:
    """A JSON string's inside of up to `most` characters, the first one a letter or a digit: it never is empty to a reader."""
    return rf"[\p{{L}}\p{{N}}]{_CHAR}{{0,{most - 1}}}"


def score_lark(reasoning: int = 300) -> str:
    """The verdict of json_score: {"reasoning": "..", "score": 0.85}. reasoning: its longest length in characters."""
    return _one_terminal(rf'\{{"reasoning": "{text_regex(reasoning)}", "score": {_SCORE}\}}')


def scores_lark(count: int, reasoning: int = 300) -> str:
    """The verdict of json_criteria on `count` criteria: {"reasoning": "..", "scores": [1, 0.5]}."""
    if count < 1:
        raise ValueError(f"a verdict on {count} criteria")
    scores = _SCORE + rf"(?:, {_SCORE}){{{count - 1}}}"
    return _one_terminal(rf'\{{"reasoning": "{text_regex(reasoning)}", "scores": \[{scores}\]\}}')


def rubric_lark(cfg: RubricConfig, units: int = 20, criterion: int = 160, level: int = 80) -> str:
    """A rubric that parse_rubric accepts, but for two equal criteria, which no grammar without memory rules out.

    Weights are multiples of 1 / units and add up to 1: a rule for each (units left, criteria written). criterion, level: the
    longest lengths in characters. UserError where the least number of criteria doesn't fit into 1 / units each.
    """
    low, high = cfg.min_criteria, min(cfg.max_criteria or max(MOST_CRITERIA, cfg.min_criteria), units)
    if low > high:
        what = f"rubric.min_criteria={low} criteria can't have weights in steps of {1 / units:g}"
        expected = f"at most {units}, or rubric.guided=false"
        raise UserError(what, where="rubric.guided, rubric.min_criteria", expected=expected)
    rules = [f"start: {LEAD} OPEN left_{units}_0", 'OPEN: "{\\"criteria\\": ["']
    rules += [f"HEAD: {_slashed(_head(criterion))}", f"LEVELS: {_slashed(_levels(level))}", 'NEXT: ", "', 'END: "]}"']
    for left in range(units, 0, -1):
        for written in range(high):
            options = _weights(left, written, low, high, units)
            if options:
                rules.append(f"left_{left}_{written}: HEAD ({' | '.join(options)})")
    return "\n".join(rules)


def _weights(left: int, written: int, low: int, high: int, units: int) -> list[str]:
    """The weights that the next criterion may have, each with what follows it."""
    options, now = [], written + 1
    for weight in range(1, left):
        needed = max(low - now, 1)  # criteria to come, a unit each at least
        if now < high and left - weight >= needed:
            options.append(f'"{weight / units:g}" LEVELS NEXT left_{left - weight}_{now}')
    if low <= now <= high:
        options.append(f'"{_last(left, units)}" LEVELS END')
    return options


def _last(left: int, units: int) -> str:
    return "1.0" if left == units else f"{left / units:g}"


def _head(criterion: int) -> str:
    return rf'\{{"criterion": "{text_regex(criterion)}", "weight": '


def _levels(level: int) -> str:
    text = f'"{text_regex(level)}"'
    between = "".join(rf'(?:, "{score}": {text})?' for score in _BETWEEN)
    return rf', "scoring_levels": \{{"1\.0": {text}{between}, "0\.0": {text}\}}\}}'


def _one_terminal(regex: str) -> str:
    return f"start: {LEAD} BODY\nBODY: {_slashed(regex)}"


def _slashed(regex: str) -> str:
    return f"/{regex}/"
