"""Checks of what lanes computed and of what the store and the model files hold."""
