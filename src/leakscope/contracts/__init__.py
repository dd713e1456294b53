"""The vocabulary of every other room, one file each; settings and registry describe its parts and find them by name."""
