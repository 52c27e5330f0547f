"""Experiments: one file each, with get_config() and a docstring that holds the command, the hardware and the expected result."""
