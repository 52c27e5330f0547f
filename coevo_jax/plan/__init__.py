"""What a config needs on a pod slice and how long a step would take, compiled for a slice that nobody owns (tpu/plan.py)."""
