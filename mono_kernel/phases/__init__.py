"""The phases of the layer, traced: a function `(ctx, task)` each; context.py says what ctx is."""
