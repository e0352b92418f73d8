"""Plans of lowered methods, kept in the on-disk cache."""
