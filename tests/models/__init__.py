"""Reference models, their exports to `.pte`, and the eager outputs that tests and benchmarks
compare with."""
