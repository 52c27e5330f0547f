"""What a run leaves behind: verdicts, metrics, rollouts, checkpoints and the run folder."""
