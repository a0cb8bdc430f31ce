"""Pure functions of arrays: no modules, no state, no choice of backend."""
