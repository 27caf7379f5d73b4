"""For tests and benchmarks only: nothing that serves imports this package."""
