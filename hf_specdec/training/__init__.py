"""Training of drafters: data, losses, loop."""
