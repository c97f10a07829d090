"""Two commits on the same work, in alternation: `python -m benchmarks.paired --base COMMIT`."""
