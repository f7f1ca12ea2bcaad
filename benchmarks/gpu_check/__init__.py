"""`make gpu-check`: tests, kernel times and engine figures on a machine with a CUDA GPU, in under ten minutes.

    python -m benchmarks.gpu_check [--parts kernels,steps] [--json DIR] [--seconds 570] [--tiny]

It runs with the machine's own Python and whatever that has: a part whose packages are missing is skipped by name (`make
gpu-wheels` fetches the few that matter into .gpu-wheels, which is used where it lies). Every part is a process of its
own with a share of the time, and every case inside it is recorded when it is done: a CUDA fault, a hang or an error
costs one case. JSON is written after each part; the table with the goals beside the figures comes last. --tiny runs
every line of it on a CPU with toy sizes, which proves the program and says nothing about speed.

    parts.py      what is run, in which order, for how long     record.py   figures, failures, goals
    limits.py     copy bandwidth and matmul rate of the card    bounds.py   what a step must take at least
    tests.py      kernels, models and engine on the device      kernels.py  time of every kernel, and of torch's
    steps.py      decode and prefill by the ModelRunner         profile.py  where the time of a step goes
    serving.py    nano-vllm workload, 100 users, memory         transformers_peer.py  the same prompts by transformers
    http.py       100 users over HTTP, where fastapi is there   report.py   table and JSON
    tiles.py      attention with other tiles, on request    bench.py    how a kernel is timed
"""
