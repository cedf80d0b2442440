"""Checkers: programs that say whether a sample is right, where there is a truth to check against."""
