"""One driver per stack; ``driver(name)`` gives it."""
