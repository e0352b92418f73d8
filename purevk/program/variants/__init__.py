"""Exported graphs of methods, lowered for the sizes that calls bring."""
