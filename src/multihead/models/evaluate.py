"""The figures of the model cards, measured again from the weights in the package: `make evaluate`.

Run as `python -m multihead.models.evaluate`; it exits with 1 where a card says something else.
"""

import re
import sys

from torch import Tensor

from multihead.models import images, texts
from multihead.models.lm import LanguageModel
from multihead.models.recipes import accuracy, bits_per_byte, head_scores
from multihead.models.store import TRAINED, load
from multihead.models.vit import VisionTransformer

Figures = dict[str, str]


def card(name: str) -> Figures:
    """The figures of a model card: the rows of its tables."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (TRAINED / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


def size(name: str) -> Figures:
    """Parameters, and bytes of the file."""
    parameters = sum(p.numel() for p in load(name).parameters())
    return {"parameters": f"{parameters:,}", "bytes": f"{(TRAINED / f'{name}.safetensors').stat().st_size:,}"}


def heads(model: LanguageModel) -> Figures:
    """The head of each kind that the lens scores highest, on random tokens that are said twice."""
    before, after = head_scores(model)
    return {"previous-token head": _best(before), "induction head": _best(after)}


def _best(scores: Tensor) -> str:
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return f"layer {layer}, head {head}: {float(scores.max()):.2f}"


def measure(name: str) -> Figures:
    """Every figure of the model of this name; needs the data it is judged by."""
    model = load(name)
    if isinstance(model, VisionTransformer):
        _, held_out, _ = images.read_labelled(None, model.size)
        return size(name) | {
            "accuracy on the 10,000 test images": f"{100 * accuracy(model, *images.read_fashion('t10k')):.2f} %",
            "accuracy on the 5,000 held-out training images": f"{100 * accuracy(model, *held_out):.2f} %",
        }
    _, documents = texts.hold_out(texts.read_documents())
    return size(name) | {"bits per byte of the held-out text": f"{bits_per_byte(model, documents):.3f}"} | heads(model)


def main() -> int:
    """Measure, compare with the cards, and say so."""
    wrong = 0
    for name in ("vit", "lm"):
        said = card(name)
        for what, value in measure(name).items():
            same = said.get(what) == value
            wrong += not same
            print(f"{name:<4} {what:<46} {value}" + ("" if same else f"   the card says {said.get(what)}"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
