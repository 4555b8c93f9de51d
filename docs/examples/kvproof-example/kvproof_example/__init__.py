"""Plugins for kvproof. Importing this imports none of them: kvproof loads one when it is asked for."""
