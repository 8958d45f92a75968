"""Puts our kernels into transformers models, and loads models."""

from .configs import CONFIGS as CONFIGS
from .files import ModelFileError as ModelFileError
from .generate import Comparison as Comparison, Draw as Draw, Generation as Generation, compare as compare, encode as encode, generate as generate
from .load import DTYPES as DTYPES, Loaded as Loaded, demo_gguf as demo_gguf, load as load, outline_of as outline_of, random_model as random_model
from .patch import Report as Report, patch as patch
from .shard import Shard as Shard, cut as cut, shard_of as shard_of
