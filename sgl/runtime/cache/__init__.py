"""Pages of keys and values: who owns each, and the radix tree that shares prefixes between requests."""
