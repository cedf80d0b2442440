"""The built-in models, one folder each."""
