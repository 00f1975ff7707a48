"""Executes batches on a device: packs, runs the model or a captured graph, samples."""
