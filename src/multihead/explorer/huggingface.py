"""A Hugging Face model as something to explore: any whose attention goes through transformers' interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from multihead import hf
from multihead.explorer.packaged import SENTENCES
from multihead.explorer.reading import Reader
from multihead.explorer.request import Refused
from multihead.explorer.subject import MOST_LONG, Items
from multihead.explorer.tokens import Token, bytes_of, token
from multihead.layer import MultiHeadAttention
from multihead.layer.trace import Trace
from multihead.lens import Lens
from multihead.models.blocks import Given

NAME = "multihead"
TWINS = 8  # layers whose matrices are kept in our shapes


Layers = list[tuple[str, MultiHeadAttention | None, dict[str, int]]]


def find_layers(model: Any, **inputs: Any) -> Layers:
    """The layers that are called on these inputs, with their sizes."""
    found: Layers = []
    for name in hf.attentions(model):
        s = hf.trace(model, name, **inputs).sizes
        found.append((name, None, {"E": s.E, "H": s.H, "G": s.G, "D": s.D, "V": s.V, "C": s.C}))
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention that goes through transformers' interface")
    return found


def twins_of(model: Any, **inputs: Any) -> Callable[[int], MultiHeadAttention | None]:
    """For each layer, one of ours with the same weights, if they lie in a known layout; the latest ones are kept."""
    return lru_cache(maxsize=TWINS)(lambda number: hf.trace(model, number, **inputs).layer)


class Theirs(Reader):
    """A model of transformers, with its tokenizer or without: then its items are bare token numbers."""

    id, masks = "model", False

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        if getattr(model, "main_input_name", "input_ids") != "input_ids" or model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} does not take one text: expected a model of one sequence of tokens; "
                "for others there are mh.hf.trace and mh.hf.watch"
            )
        if model.config._attn_implementation != NAME:
            model.set_attn_implementation(NAME)
        self.size = model.get_input_embeddings().num_embeddings
        few = torch.tensor([[0, min(1, self.size - 1)]])
        self._layers = find_layers(model, input_ids=few)
        writes = any(word in type(model).__name__ for word in ("CausalLM", "LMHead"))
        self.predicts = "tokens" if writes else None
        self.decodes = writes
        count = sum(p.numel() for p in model.parameters())
        self.about = f"{type(model).__name__}: {len(self._layers)} layers, {count:,} parameters."
        self._twin = twins_of(model, input_ids=few)
        self.gives_weights = self._twin(0) is not None

    def layers(self) -> Layers:
        return self._layers

    def layer(self, number: int) -> tuple[str, MultiHeadAttention | None, dict[str, int]]:
        name, _, sizes = super().layer(number)
        return name, self._twin(number), sizes

    def examples(self) -> list[dict[str, Any]]:
        given = [] if self.long is None else [{"input": {"kind": "given"}, "label": "what was given"}]
        if self.tokenizer is None:
            return [*given, {"input": {"kind": "tokens", "ids": [0, 1, 2]}, "label": "three tokens"}]
        return [*given, *({"input": {"kind": "text", "text": said}, "label": said} for said in SENTENCES)]

    def parts(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name, _, _ in self._layers]

    def token(self, number: int) -> Token:
        if self.tokenizer is None:
            return {"id": number, "text": f"⟨{number}⟩", "bytes": ""}
        if number in self.tokenizer.all_special_ids:
            return {"id": number, "text": self.tokenizer.decode([number]), "bytes": ""}
        piece = self.tokenizer.convert_ids_to_tokens(number)
        return token(number, bytes_of(piece, lambda: self.tokenizer.decode([number]), self._byte_level))

    @property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(getattr(getattr(self.tokenizer, "backend_tokenizer", None), "decoder", ""))

    @property
    def longest(self) -> int:
        """What its positions allow; where its configuration does not say, as much as a map shows."""
        said = getattr(self.model.config, "max_position_embeddings", None) or MOST_LONG
        return max(self.most, min(MOST_LONG, said))

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise Refused(f"{self.name} came without a tokenizer: expected mh.explore(model, x, tokenizer=…)")
        return self.tokenizer(text.encode("utf-8", "replace").decode())["input_ids"]

    def trace(self, items: Items, layer: int, mask: Given) -> Trace:
        return hf.trace(self.model, layer, input_ids=items.data)

    def look_at(self, items: Items, layer: int, mask: Given) -> Lens:
        body = getattr(self.model, "base_model", self.model)  # no logits: they would be N × vocabulary
        with hf.watch(self.model, layer) as seen:
            body(input_ids=items.data)
        return seen[layer]

    def look(self, items: Items, mask: Given) -> list[Lens]:
        with hf.watch(self.model) as seen:
            self.model(input_ids=items.data)
        return [seen[layer] for layer in seen]

    def logits(self, items: Items, mask: Given) -> Tensor:
        if self.predicts is None:
            return super().logits(items, mask)
        return self.model(input_ids=items.data).logits[0]

    def decode(self, items: Items, layer: int) -> Trace:
        if not self.decodes:
            return super().decode(items, layer)
        before = self.model(input_ids=items.data[:, :-1], use_cache=True).past_key_values
        return hf.trace(self.model, layer, input_ids=items.data[:, -1:], past_key_values=before)

    @contextmanager
    def ablated(self, number: int, heads: list[int], with_: str) -> Iterator[None]:
        with hf.ablate(self.model, {number: heads}, with_):
            yield
