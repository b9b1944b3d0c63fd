"""What averaging gradients takes on a cluster, alone and beside dispatch and combine.

from trefoil.gradients import Method, averaging
averaging(Cluster("dgx-h100"), 64, [66_034_000], Method("a2sgd")).seconds

The model: docs/a2sgd.md, "Simulated time".
"""

from trefoil.gradients.collectives import Stage, collective
from trefoil.gradients.methods import Averaged, Method, averaging, methods_of
from trefoil.gradients.training_step import Step, StepSetting, simulate_steps

__all__ = [
    "Averaged",
    "Method",
    "Stage",
    "Step",
    "StepSetting",
    "averaging",
    "collective",
    "methods_of",
    "simulate_steps",
]
