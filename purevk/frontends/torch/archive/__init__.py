"""Files of `torch.export.save` (.pt2)."""
