"""Two small models on the layer, trained, in the package: a language model and a vision transformer."""

from multihead.models import training
from multihead.models.lm import LanguageModel
from multihead.models.store import load, samples, save
from multihead.models.vit import VisionTransformer

__all__ = ["LanguageModel", "VisionTransformer", "load", "samples", "save", "training"]
