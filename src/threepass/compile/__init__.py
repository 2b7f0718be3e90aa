"""A step as one compiled program: traced, rewritten, compiled, checked, and found again by its signature."""
