"""One of each kind that a package can add to dapo by entry points."""
