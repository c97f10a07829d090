"""Reads answers of mathematics, LaTeX or plain text, into typed parts and compares them with a reference.

`tokens` cuts the text, `expressions` parses it, `evaluate` computes it exactly, `forms` decides whether it is an answer
or the question restated, `units` and `regions` hold units and sets of numbers, `parts` puts an answer together, and
`reference` compares. Only the grammar written here is read: no text of a model is evaluated as code.
"""
