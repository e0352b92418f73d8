"""Programs of torch as graphs: `torch.export`, `torch.compile`, modules. Everything here imports torch."""
