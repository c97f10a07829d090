"""Foundations: errors, files, random numbers, loading. No torch and no options."""
