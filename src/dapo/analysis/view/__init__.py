"""The local page of `dapo view`, and the same page as one file (`dapo view --save`)."""
