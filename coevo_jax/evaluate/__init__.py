"""Evaluation: rubric and judge benchmarks by their own rules, how rubrics evolve, and checks while a run trains.

    python -m coevo_jax.evaluate --benchmark=NAME --data=FILE --generator=SOURCE --judge=SOURCE --out=DIR
    python -m coevo_jax.evaluate --evolution=RUN --out=DIR

Rules are functions of arrays (rules_pairs.py, rules_lists.py, reward_bench.py); files become Examples (readers.py); a system
judges them (systems.py, checking.py); runner.py keeps what it said row by row. docs/evaluation.md.
"""
