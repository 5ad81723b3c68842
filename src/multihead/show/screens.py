"""What `multihead show` prints: a text through a language model, or a picture through a vision transformer.

As in `draw`, colour helps and is never needed.
"""

import mimetypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor

from multihead.draw import SHADES, heat_map, visible
from multihead.heads import first_token, previous_token
from multihead.layer.picture import render
from multihead.layer.trace import Trace
from multihead.models import LanguageModel, VisionTransformer, load, samples
from multihead.models.images import SUFFIXES
from multihead.models.store import NAMES

if TYPE_CHECKING:
    from multihead.lens import Lens
    from multihead.models.images import Source

START = "‹start›"  # how the token that begins each document is shown
LIKELIEST = 5
INK = "·░▒▓█"  # of a pixel, dark to light


def show(what: str, layer: int | None = None, model: str | None = None, *, brief: bool = False) -> RenderableType:
    """The screen for a text, or for the path of a picture, through a model: by name, or the package's own.

    `brief`: what fits on one screen; else every step with its numbers.
    """
    is_picture = what.lower().endswith(SUFFIXES) or os.path.isfile(what)  # a long text is no path, and no error
    if os.sep in what and os.path.isdir(what):
        raise IsADirectoryError(f"{what} is a folder: expected a text, or the path of a picture")
    if is_picture and (mimetypes.guess_type(what)[0] or "").startswith("text/"):
        raise ValueError(f'{what} is a file of text: expected the text itself, "$(cat {what})", or a picture')
    if model is None:
        model = "vit" if is_picture else "lm"
    if model not in NAMES and Path(model).suffix != ".safetensors":
        if is_picture:
            raise ValueError(f"{what} is a picture: expected a text with --model={model}, a Hugging Face model")
        try:
            import multihead.hf.screen

            return multihead.hf.screen.show(model, what, 0 if layer is None else layer)
        except (ImportError, RuntimeError) as error:
            raise without_transformers(model, error) from error
    loaded = load(model)
    if isinstance(loaded, VisionTransformer):
        if not is_picture:
            raise ValueError(f"{what!r} is a text: expected the path of a picture with --model={model}")
        return (brief_image if brief else image)(loaded, what, -1 if layer is None else layer)
    if is_picture:
        raise ValueError(f"{what} is a picture: expected a text with --model={model}")
    return (brief_text if brief else text)(loaded, what, 0 if layer is None else layer)


def without_transformers(model: str, error: ImportError | RuntimeError) -> ValueError:
    """Why transformers could not be imported: it is not there, or what it imports does not fit."""
    if isinstance(error, ImportError) and error.name == "transformers":
        return ValueError(f'model={model!r}: a Hugging Face model needs `pip install "multihead[hf]"`')
    return ValueError(f"model={model!r}: transformers cannot be used: {_first_cause(error)}")


def _first_cause(error: BaseException) -> str:
    """What the innermost of chained errors says: transformers hides an import that failed behind another."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {error}"


def sample(label: str) -> Path:
    """The package's picture of this name."""
    pictures = samples()
    if label not in pictures:
        raise ValueError(f"--sample={label!r}: expected one of {', '.join(pictures)}")
    return pictures[label]


def text(model: LanguageModel, said: str, layer: int = 0) -> RenderableType:
    """The seven steps of one layer on a text, what each head of the model does there, and what comes next."""
    assert model.tokenizer is not None
    whole = model.tokenizer.begin(said)
    tokens = torch.tensor([whole[: model.context]])
    labels = [START, *model.tokenizer.pieces(said)][: model.context]
    trace = model.trace(tokens, layer, labels)
    with torch.inference_mode():
        following = model(tokens)[0, -1].softmax(-1)
    shown = Text(" ").join(Text(visible(piece), "black on yellow") for piece in labels)
    of = f"the first {model.context} of {len(whole)} tokens" if len(whole) > model.context else "the tokens"
    cut = Text(f"{of.capitalize()}, as its tokenizer cuts the text (␣ is a space):")
    return Group(
        _heading("language model", model, layer),
        Padding(Group(cut, shown), (1, 0)),
        render(trace),
        *_section("what the heads of every layer do here", _habits(model.look(tokens))),
        *_section("what comes next", _next(following, model)),
    )


def image(model: VisionTransformer, picture: "Source", layer: int = -1) -> RenderableType:
    """A picture as patches, the seven steps of one layer, where the class token looks, and what the picture is."""
    from multihead.models.images import read

    pixels = read(picture, model.size)
    trace = model.trace(pixels[None], layer, ["class", *(f"patch {n}" for n in range(model.grid**2))])
    g, p = model.grid, model.patch
    cut = f"The picture, {model.size} × {model.size} pixels, cut into {g} × {g} patches of {p} × {p}:"
    one = f"each patch is an item, and a class token stands in front: {g * g + 1} items."
    looks = model.look(pixels[None])[layer].rows(0)[0, :, 0]  # (H, N)
    return Group(
        _heading("vision transformer", model, layer),
        Padding(Group(Text(cut), Text(one)), (1, 0)),
        Padding(_patches(pixels, p), (0, 2)),
        render(trace, pictures=False),
        *_section("where the class token looks", _class_token(looks, g)),
        *_section("what it is", Group(*(_bar(name, p) for name, p in model.classify(pixels)[:LIKELIEST]))),
    )


def _heading(kind: str, model: LanguageModel | VisionTransformer, layer: int) -> Text:
    count = len(model.blocks)
    number = layer % count if -count <= layer < count else layer
    parameters = sum(p.numel() for p in model.parameters())
    return Text(f"Layer {number} (--layer 0…{count - 1}) of a {kind} with {parameters:,} trained parameters", "italic")


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Rule(Text(title, "bold"), align="left", characters="─"), Padding(body, (0, 2))]


def _bar(name: str, p: float) -> Text:
    return Text(f"{name:<12}", "yellow").append(f"{100 * p:5.1f} % ", "default").append("█" * round(40 * p), "cyan")


def _next(following: Tensor, model: LanguageModel) -> RenderableType:
    assert model.tokenizer is not None
    p, tokens = following.topk(LIKELIEST)
    lines = [_bar(visible(model.tokenizer.decode([t])), chance) for chance, t in zip(p.tolist(), tokens.tolist())]
    return Group(Text("the last row, times the embedding, gives the likeliest next tokens:", "italic"), *lines)


def _habits(lenses: Sequence["Lens"]) -> RenderableType:
    """For each head of each layer, how much of its weight goes to the token before, and to the first token."""
    if lenses[0].shape[2] < 2:
        return Text("one token alone has nothing to look back at", "italic")
    parts: list[RenderableType] = []
    for what, score in (("the token before", previous_token), (START, first_token)):
        parts += [Text(f"percent of each head's weight on {what}", "italic")]
        parts += [Text("head     " + "".join(f"{h:>5}" for h in range(lenses[0].shape[1])), "dim")]
        for number, lens in enumerate(lenses):
            line = Text(f"layer {number:<3}", "yellow")
            for share in score(lens)[0].tolist():
                line.append(f"{100 * share:5.0f}", "bold green" if share >= 0.5 else "default")
            parts.append(line)
    return Group(*parts)


def _patches(pixels: Tensor, patch: int) -> Text:
    """The picture, a character for two pixels (one below the other), with gaps between the patches."""
    size = pixels.shape[0]
    picture = Text()
    for top in range(0, size, 2):
        if top and top % patch == 0:
            picture.append("\n")
        for across in range(size):
            if across and across % patch == 0:
                picture.append(" ")
            light = float(pixels[top : top + 2, across].mean())
            shade = round(40 + 215 * light)
            ink = INK[round(light * (len(INK) - 1))]
            picture.append(ink, f"rgb({shade},{shade},{shade})")
        picture.append("\n")
    return picture


def _class_token(weights: Tensor, grid: int) -> RenderableType:
    return Group(
        Text("no mask: every item sees every item", "italic"),
        Text("the weight it gives to each patch, by head:", "italic"),
        Columns(_maps(weights, grid), padding=(0, 3)),
    )


def _maps(weights: Tensor, grid: int) -> list[Text]:
    """Each head's weights (H, 1 + grid²), patch by patch, from nothing to the most that a patch of the head has."""
    maps = []
    for head, row in enumerate(weights.tolist()):
        most = max(row[1:])
        picture = Text(f"head {head}, █ = {100 * most:.0f} %\n", "bold")
        for down in range(grid):
            for w in row[1 + down * grid : 1 + (down + 1) * grid]:
                level = w / most if most > 0 else 0.0
                heat = round(255 * level)
                ink = SHADES[round(level * (len(SHADES) - 1))] * 2
                picture.append(ink, f"not bold rgb({heat},{round(heat * 0.55)},{60 - round(heat * 0.2)})")
            picture.append("\n")
        maps.append(picture.append(f"itself {100 * row[0]:.0f} %\n", "not bold dim"))
    return maps


# On one screen --------------------------------------------------------------------------------------------------------

SHARPEST = 2  # heads whose weights are drawn
FEW = 3  # of the likeliest
MOST_DRAWN = 14  # items of a heat map


def brief_text(model: LanguageModel, said: str, layer: int = 0) -> RenderableType:
    """The tokens, the seven steps in a line each, the two heads that look most sharply, and what comes next."""
    assert model.tokenizer is not None
    tokens = torch.tensor([model.tokenizer.begin(said)[: model.context]])
    labels = [START, *model.tokenizer.pieces(said)][: model.context]
    trace = model.trace(tokens, layer, labels)
    with torch.inference_mode():
        following = model(tokens)[0, -1].softmax(-1)
    weights, hidden = trace["weights"], trace["masked"] == -torch.inf
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean(-1)  # (H,)
    sharpest = sorted(entropy.argsort()[:SHARPEST].tolist())
    newest = slice(max(0, len(labels) - MOST_DRAWN), None)
    names = labels[newest]
    maps = [
        heat_map(f"head {h}", names, names, weights[h, newest, newest], hidden[h, newest, newest], False)
        for h in sharpest
    ]
    p, likeliest = following.topk(FEW)
    cut = Text("tokens  ").append_text(Text(" ").join(Text(visible(piece), "black on yellow") for piece in labels[:24]))
    return Group(
        _heading("language model", model, layer),
        cut,
        Text(),
        _seven(trace),
        Text(),
        Text(
            f"who attends to whom, {SHADES} least to most, in the sharpest {SHARPEST} of {len(entropy)} heads", "italic"
        ),
        Columns(maps, padding=(0, 3)),
        Text("what comes next", "italic"),
        *(_bar(visible(model.tokenizer.decode([t])), chance) for chance, t in zip(p.tolist(), likeliest.tolist())),
    )


def brief_image(model: VisionTransformer, picture: "Source", layer: int = -1) -> RenderableType:
    """The patches beside where the class token looks, the seven steps in a line each, and what the picture is."""
    from multihead.models.images import read

    pixels = read(picture, model.size)
    trace = model.trace(pixels[None], layer)
    drawn = Table.grid(padding=(0, 3))
    drawn.add_row(_patches(pixels, model.patch), Columns(_maps(trace["weights"][:, 0], model.grid), padding=(0, 2)))
    return Group(
        _heading("vision transformer", model, layer),
        Text(f"{model.grid**2} patches and a class token, and where the class token looks, head by head", "italic"),
        drawn,
        _seven(trace),
        Text(),
        Text("what it is", "italic"),
        *(_bar(name, p) for name, p in model.classify(pixels)[:FEW]),
    )


def _seven(trace: Trace) -> Table:
    """The seven steps, a line each: what each does, and the shapes."""
    table = Table.grid(padding=(0, 2))
    before = trace["x"]
    for step in trace.steps:
        after = trace[step.names[-1]]
        shapes = f"{tuple(before.shape)} → {tuple(after.shape)}"
        table.add_row(f"{step.number} {step.title}", Text(step.formula.split("   ")[-1], "cyan"), Text(shapes, "dim"))
        before = after
    return table
