"""What looks at runs: it reads run directories and writes nothing into them."""
