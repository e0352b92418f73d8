"""Runs graphs on a device: kernels made ready, memory planned, command buffers recorded and
submitted."""
