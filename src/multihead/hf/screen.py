"""What `multihead show --model` prints of a Hugging Face model: the tokens, and the weights of any layer of it."""

from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from multihead.draw import MOST_ITEMS, draw_mask, draw_weights, visible
from multihead.hf.interface import NAME
from multihead.hf.place import place, refusal
from multihead.hf.watch import attentions, watch
from multihead.lens.region import At


def show(name: str, said: str, layer: int = 0) -> RenderableType:
    """One layer of a model on a text.

    Args:
        name: a folder, a name on the hub, or a GGUF file.
        said: the text.
        layer: which, counted through the model's attention modules; a negative number counts from the last.
    """
    if not said.strip():
        raise ValueError(f"text={said!r} is empty: expected at least one word")
    tokenizer, model = _load(name)
    encoded = tokenizer(said, return_tensors="pt")
    names = list(attentions(model))
    with torch.inference_mode(), watch(model, layers=layer) as seen:
        model(**encoded)
    [(number, lens)] = seen.items()
    H, Q = lens.shape[1:3]
    labels = [tokenizer.decode([token]) for token in encoded["input_ids"][0].tolist()]
    few = slice(0, min(Q, MOST_ITEMS))
    hidden = ~lens.allowed(At(slice(0, 1), slice(0, H), few, few))[0].expand(H, -1, -1)
    weights = lens.rows(few)[0, :, :, few].float()
    cut = Text(" ").join(Text(visible(piece), "black on yellow") for piece in labels)
    return Group(
        Text(f"Layer {number} of {name}, with layers 0…{len(names) - 1} (--layer): {names[int(number)]}", "bold"),
        Text(f"{Q} items, {H} heads; {type(model).__name__}"),
        Padding(Group(Text("The tokens, as its tokenizer cuts the text:"), cut), (1, 0)),
        draw_mask(labels, hidden[0]),
        Text(),
        *draw_weights(labels, labels, weights, hidden),
    )


def _load(name: str) -> tuple[Any, Any]:
    there = place(name)
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**there)
        model = AutoModel.from_pretrained(**there, attn_implementation=NAME)
    except ModuleNotFoundError as error:  # of another package: what `show` says goes down to the first cause
        raise ImportError(f"transformers cannot load {name!r}: {error}") from error
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise refusal(name, error) from error
    return tokenizer, model.eval()
