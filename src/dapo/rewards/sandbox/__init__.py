"""Running a program that a model wrote: what it may do (`jail`), how it is asked (`exchange`), how it is run."""
