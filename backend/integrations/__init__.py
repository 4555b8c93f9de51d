"""Ours inside engines that people already run."""
