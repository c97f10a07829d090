"""The Python interface of dapo; the command line uses the same functions."""
