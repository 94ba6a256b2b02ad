"""SGLang plugin that serves DeepSeek-V4 from full-NVFP4 checkpoints with an NVFP4 KV pool."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, patches/ and kernels/ lie beside this package; in a wheel, inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))
