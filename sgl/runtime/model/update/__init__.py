"""New weights in the place of a model's: by the names of a Hugging Face checkpoint, without a restart."""
