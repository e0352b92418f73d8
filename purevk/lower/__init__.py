"""The tools that operator families share to emit dispatches. They use no device and no registry."""
