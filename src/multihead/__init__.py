"""Multi-head attention you can see through, at full speed."""
