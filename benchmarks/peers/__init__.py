"""The comparison with other libraries; run as `python benchmarks/peers` (see its README section and `__main__.py`)."""
