"""The algebra that solving attacks share: linear systems, constraints, residual blocks, last layers, index matrices."""
