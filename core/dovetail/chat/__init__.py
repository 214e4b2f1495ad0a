"""Prepare chat requests for the model, constrain their outputs, and read them. No torch."""
