"""Deterministic simulation: the real scheduler, block manager and Driver under virtual time, on a device that checks.

A seed draws a configuration and a list of events (arrivals, aborts, a drain ...); the run plays them against the code
under test. Nothing in it depends on time, on threads or on the order of a set, so the same seed is the same run.

- model.py     what the fake model generates, and the unbatched oracle; beams.py the same for beam searches
- device.py    the fake KV device: contents are read back through the block tables in every step
- swarm.py     what a seed draws
- worker.py    the Worker process: it dies, hangs, is stopped, comes back with another pool; executor.py is its socket
- disk.py      the disk tier: the real file and queues, in virtual time, with faults and damage
- monitor.py   invariants after every step; watched.py and prefetch.py hook it to the classes under test
- admission.py the books of admission by prediction
- coverage.py  rare states that a long run must have reached
- core_run.py, driver_run.py   the two levels: Scheduler and BlockManager alone, and the whole Driver (virtual_time.py)
- sudden_stop.py  the second, stopped in some turn of the event loop
- runner.py    many seeds, failures repeated and shrunk; mutants.py plants faults that must be found

`python -m tests.sim --help`, `make sim`, `make sim-mutants`.
"""
