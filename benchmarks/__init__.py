"""Benchmarks of the losses: every number in the README comes from a file that these programs wrote under `results/`.

    python -m benchmarks.demo                          # one batch of 16,384 on this machine, a minute or two
    python -m benchmarks.loss --sizes 1024,4096,16384  # time and memory beside other implementations
    python -m benchmarks.loss --redraw FILE            # table and figure again, from kept rows
    python -m benchmarks.errors --device cuda          # how far gradients are off, by precision
    python -m benchmarks.tune                          # block sizes of the fused kernels on this device

peers.py lists the implementations, check.py holds the exact answer, memory.py finds the peak, measure.py runs one case
in a process of its own and machine.py says where; report.py and figures.py show rows.
"""
