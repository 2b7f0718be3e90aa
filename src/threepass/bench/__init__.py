"""`threepass bench`: what a training step costs, by three passes, by plain training, and by what is used today.

case.py      one configuration: net, batch, precision, machine; all its methods, measured in one process
methods.py   the methods: a step's gradients, as each one's authors define them
execution.py how a step runs: eagerly, or at its best (captured or compiled, as a CUDA graph)
timing.py    clocks, peak memory, the device's ceilings
limits.py    operations and bytes that a step cannot do without
large.py     nets of the sizes that people train, one form after the other
suite.py     many cases, each in a process of its own: the suites by machine, and the sweeps
scaling.py   growth with depth, width, batch and image, as fitted exponents
tables.py    what is printed, and the tables of README and docs
page.py      the sweeps as a page
"""
