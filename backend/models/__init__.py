"""Models: checkpoints as they are found on disk, their tokenizers, and the runners that compute them."""
