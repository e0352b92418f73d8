"""Operators on a device, against torch."""
