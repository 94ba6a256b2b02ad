"""The embedded small model and the demonstration that talks to it."""
