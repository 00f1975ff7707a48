"""Any decoder of transformers, with our attention over our cache."""
