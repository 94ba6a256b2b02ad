"""Reading a checkpoint: key styles, quantisation per tensor, the account of keys."""
