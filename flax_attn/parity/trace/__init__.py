"""Where two sides differ, node by node, and why."""
