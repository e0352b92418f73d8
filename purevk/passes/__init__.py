"""Graph to graph: what makes a file's nodes into few, large kernels. `pipeline.PASSES` has the
order."""
