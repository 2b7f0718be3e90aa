"""The tape: what pass 1 records of the user's model, and how a recorded operation is run again."""
