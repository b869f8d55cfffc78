"""`ringtrain.keras` for scripts that import `horovod.tensorflow.keras`."""

from ringtrain.keras import *  # noqa: F403
from ringtrain.keras import __all__ as __all__
from ringtrain.keras import __getattr__ as __getattr__
