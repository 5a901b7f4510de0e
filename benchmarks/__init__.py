"""Speed, measured. `python -m benchmarks.kernels` times every operation; each file here times one thing."""
