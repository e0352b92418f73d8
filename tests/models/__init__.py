"""Reference models, their exports to `.pte`, and the inputs and eager outputs that tests and benchmarks compare with."""
