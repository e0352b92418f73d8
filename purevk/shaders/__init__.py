"""GLSL to SPIR-V: texts with includes and macros, the compiler, entries of the cache."""
