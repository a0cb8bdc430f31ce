"""Published models, built from the modules."""
