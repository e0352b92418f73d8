"""Benchmarks: purevk beside other runtimes, in one run."""
