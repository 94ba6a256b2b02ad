"""The attention backend and the slot lists it works on."""
