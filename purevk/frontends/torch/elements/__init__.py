"""Numbers that follow from elements of tensors which are known before a call."""
