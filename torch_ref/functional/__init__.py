"""Pure functions of tensors: no modules, no state."""
