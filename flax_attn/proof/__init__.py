"""Our own variants, judged by the parity harness; the faults that it must detect."""
