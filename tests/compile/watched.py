"""A signature for tests of the table of programs."""

from threepass.compile.signature import State


class Watched:
    """A signature that says what it is told."""

    def __init__(self):
        self.items = {"model.p": (float, (0.5).hex())}

    def state(self):
        return State(self.items)
