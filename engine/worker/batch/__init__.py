"""Turns a StepPlan into arrays: the rows of live sequences, and the buffers that carry a step to the device."""
