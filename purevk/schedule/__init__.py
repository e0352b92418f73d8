"""Compile time after the passes: storages, segments and the plan of a call."""
