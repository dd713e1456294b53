"""The vocabulary, side by side: what every other room speaks in.

Knowledge, observation, protocol, defense (and its channel), attack, reconstruction, task and inputs are one file each;
settings and registry are how they describe themselves and are found by name.
"""
