"""Pass 1's tape: what it records of the user's model, and how an operation on it is run again."""
