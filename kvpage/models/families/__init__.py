"""Model families: a table entry or a small module for each (docs/models.md says how to add one)."""
