"""The table of devices: drivers of Vulkan, with and without their hardware, and what kernels and
models do on them. `python -m bench.drivers` makes it."""
