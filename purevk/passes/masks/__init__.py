"""Masks of attention that are built from positions.

The pass follows a mask back to what makes it: comparisons of positions, `tril`, constant tables, `where`
with -inf.

- If each query sees the keys between two positions, these *limits* become an operand of the attention,
  int32 `[..., 1]` (the key after the last) or `[..., 2]` (the first key too). The pass emits them by the
  operators of the mask, applied to one column in place of all keys.
- What else a mask says, such as padding, stays a mask.
- Masks of finite numbers stay: a row in which all are low sees all keys.
- Kernels start and end at the limits of their queries. They are data, so one recording serves all
  positions.
"""
