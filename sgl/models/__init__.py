"""Models that come with the package: `embedded/` is a Hugging Face folder, described by its README.md."""
