"""The engine's one thread: takes requests, runs steps, hands out results."""
