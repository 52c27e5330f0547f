"""A run as one self-contained HTML file: curves, phases, alarms and every question's rubrics, answers and verdicts over time."""
