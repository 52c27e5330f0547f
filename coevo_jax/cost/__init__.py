"""What a compiled TPU program costs, read from its HLO text: FLOPs, HBM traffic, collectives and a modelled time. Nothing is run.

The model (all of it): seconds are the sum over operations of max(flops / 0.75 peak, bytes / 0.8 bandwidth), plus every transfer
that the schedule does not overlap. The result is a model; benchmarks/published.py prints its error on published figures.
"""

from coevo_jax.cost.links import Network
from coevo_jax.cost.operations import Kernel, decode_kernels
from coevo_jax.cost.program import Cost, Loop, Op, program_cost
from coevo_jax.cost.useful import mfu, product_parameters, useful_update_flops

__all__ = [
    "Cost",
    "Kernel",
    "Loop",
    "Network",
    "Op",
    "decode_kernels",
    "mfu",
    "product_parameters",
    "program_cost",
    "useful_update_flops",
]
