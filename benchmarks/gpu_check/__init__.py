"""`make gpu-check`: kernel times, engine figures and tests on a machine with a CUDA GPU, in under ten minutes.

    python -m benchmarks.gpu_check [--parts decode,linears] [--resume RESULT.json] [--json DIR] [--seconds 570] [--tiny]

It runs with the machine's own Python and whatever that has (`make gpu-wheels` fetches the few packages that such a
machine may lack into .gpu-wheels, which is used where it lies). Every part is a process of its own with a share of the
time, and every case inside it is recorded when it is done: a CUDA fault, a hang or an error costs one case. JSON is
written after each part, a later call goes on from it, and verdicts on the goals come last. --tiny runs every line of it
on a CPU with toy sizes, which proves the program and says nothing about speed.

    parts.py      what is run, in which order, for how long     record.py      figures, failures, goals
    limits.py     bandwidth and matmul rate of the card         bounds.py      what a step must take at least
    operators.py  launches, bytes, FLOPs of a step's operators  datasheets.py  limits where none were measured
    steps.py      decode, prefill and mixed steps               fabricated.py  sequences that were never prefilled
    profile.py    where the time of a step goes                 serving.py     nano-vllm workload, 100 users, memory
    users.py      100 users on a 7B                             transformers_peer.py  the same prompts by transformers
    kernels.py    attention, row kernels, sampling              linears.py     linear layers beside cuBLAS
    graphs.py     start-up, graphs against eager steps          tests.py       kernels, models, engine on the device
    http.py       100 users over HTTP                           tiles.py       attention with other tiles, on request
    tools.py      ncu and compute-sanitizer, on request         probe.py       the program that those two watch
    carry.py      what travels to a bare machine and back       verdicts.py    one line for each goal
    report.py     table and JSON                                bench.py       how a kernel is timed
"""
