"""Debug modes: compares what the device computes with eager torch, node by node (PUREVK_CHECK=1),
and finds the pass or device feature that makes a program differ (`purevk bisect`)."""
