"""A step as one compiled program: traced, rewritten, compiled, checked, and looked up by its signature."""
