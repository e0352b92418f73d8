"""Masks of attention that are built from positions."""
