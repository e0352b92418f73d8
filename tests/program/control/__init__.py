"""Control flow and sizes that depend on data."""
