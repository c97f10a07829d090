"""Libraries: each folder imports nothing of dapo, and its page says what it covers and what it does not."""
