"""Puts a run together: `resolve` settles `auto`, `inputs` reads data and model, `build` names concrete classes."""
