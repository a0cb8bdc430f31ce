"""Where two sides part, node by node, and why."""
