"""Turns a StepPlan into arrays: the rows of live sequences, and the buffers that carry a step to the device."""

from engine.worker.batch.host_decodes import HostDecodes
from engine.worker.batch.input_batch import InputBatch, SampleTargets, StepInputs

__all__ = ["HostDecodes", "InputBatch", "SampleTargets", "StepInputs"]
