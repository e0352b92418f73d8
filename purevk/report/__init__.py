"""Reports: what a lowered method is made of, what its dispatches take, and pages that show it."""
