"""ExecuTorch's files as graphs: methods, delegates of its Vulkan backend, control flow, names."""
