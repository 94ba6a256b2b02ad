"""Serving benchmark of the embedded model against stock SGLang, with a stored baseline."""
