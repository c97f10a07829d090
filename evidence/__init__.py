"""The experiments on the paper's claims: the base model, configurations, and verifiers that some of
them need.
"""
