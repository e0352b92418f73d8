"""Quantized models, as exporters write them."""
