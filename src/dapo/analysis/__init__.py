"""Analysis of runs: reads run directories and writes nothing into them."""
