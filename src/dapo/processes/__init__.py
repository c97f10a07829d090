"""Worker processes: their start, messages, limits, output and end.

Rewards and environments run user code in them, under a supervisor and with messages of JSON
(`pool`); `distributed` runs its own code, with messages of pickle.
"""
