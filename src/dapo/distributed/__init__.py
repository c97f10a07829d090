"""More than one process: workers, how they are started, and what is spread over them."""
