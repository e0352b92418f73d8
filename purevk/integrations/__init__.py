"""Recipes that run programs on engines which spread work over machines: Ray, LitServe, KServe, Triton. The
engine has the server and the scheduler; `worker.Worker` is what they share."""
