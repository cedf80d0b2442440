"""The built-in models, one folder each, and the command that measures them for their cards."""
