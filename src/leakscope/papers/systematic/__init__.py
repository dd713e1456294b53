"""Tables of "Data Reconstruction Attacks and Defenses: A Systematic Evaluation" (Liu et al.)."""

from leakscope.papers.systematic import batches, features

TABLES = (*features.TABLES, *batches.TABLES)
