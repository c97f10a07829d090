"""Puts a run together: `resolve` resolves `auto`, `inputs` reads data and model, `build` names
concrete classes.
"""
