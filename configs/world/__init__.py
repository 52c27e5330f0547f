"""The baselines of the paper, one file each."""
