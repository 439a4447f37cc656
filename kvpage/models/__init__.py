"""Layer specs from a model's public config: what each layer keeps, by model family (docs/models.md)."""

from kvpage.models.config import Config as Config
from kvpage.models.model import ModelLayers as ModelLayers
from kvpage.models.options import ModelOptions as ModelOptions
from kvpage.models.reader import read_config as read_config
from kvpage.models.reader import read_model as read_model
from kvpage.models.reading import Family as Family
