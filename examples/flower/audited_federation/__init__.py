"""Two clients, two rounds, audited on both sides."""
