"""Reading somebody's model: one recorder of what layers receive and give, heads, first layers, chains,
kinks, and layers that a server planted."""
