"""Runs graphs on a device: makes kernels, plans memory, records and submits command buffers."""
