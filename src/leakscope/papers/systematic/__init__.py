"""Tables of "Data Reconstruction Attacks and Defenses: A Systematic Evaluation" (Liu et al.)."""

from leakscope.papers.systematic import attack, defenses, features

TABLES = (features.TABLE, *attack.TABLES, *defenses.TABLES)
