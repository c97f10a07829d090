"""The Python interface: `import dapo` gives what is public here; the command line stands on the same functions."""
