"""Other people's libraries: each integration is a file, behind its extra, and loads its library on first use."""
