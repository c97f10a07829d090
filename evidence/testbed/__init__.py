"""The testbed: under which condition each technique of DAPO acts, `python -m evidence.testbed`.

A response is a letter, digits that count on, and a full stop: `B90123.`. The letter is a strategy,
and a verifier says right with the probability of that strategy. One thing can be learned, the share
of the better strategy, and formulas predict how fast each loss learns it. Base models are made from
tables of strategies in seconds.

    base.yaml          the configuration of every run
    NAME.yaml          an experiment: one condition in levels, rows that differ in one option, a prediction
    results/NAME.jsonl the runs of an experiment, one a line
"""
