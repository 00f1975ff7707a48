"""The HTTP border, with the engine in a process of its own."""
