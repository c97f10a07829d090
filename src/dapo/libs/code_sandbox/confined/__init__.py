"""Scripts that run inside the confined processes: standard library only, and nothing of the other
modules.
"""
