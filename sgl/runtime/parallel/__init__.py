"""Several processes that execute the same batches: rank 0 decides, the others follow."""
