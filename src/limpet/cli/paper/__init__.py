"""`limpet paper`: one module for each of its commands."""
