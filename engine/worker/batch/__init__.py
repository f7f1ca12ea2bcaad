"""A step's plan as arrays: the rows that the Worker keeps, and the buffers that carry them to the device."""
