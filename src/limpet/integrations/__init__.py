"""limpet inside other libraries."""
