"""Timing of single operators for `purevk bench --ops`."""
