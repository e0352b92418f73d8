"""Whole programs, from a `.pte` file to its outputs."""
