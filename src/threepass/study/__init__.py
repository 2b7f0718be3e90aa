"""Studies: measurements of whole nets, each a `run` that writes its numbers as JSON and a figure beside them."""
