"""What a model needs: which rules serve it, how far the modes agree, and the variances of its signals."""
