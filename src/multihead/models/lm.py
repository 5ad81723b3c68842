"""A language model on the layer: tokens, a causal mask, RoPE, and a key/value cache to write with.

B batch · N tokens · E model width. Token i sees tokens 0…i, and of those the newest `context`: a longer text slides
through that window, so that a token costs the same however many came before.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multihead.attention import modules_watched
from multihead.cache import Cache
from multihead.kernel.linear import linear
from multihead.masks import Causal
from multihead.models import induction, sampling
from multihead.models.blocks import Given, Stack
from multihead.positions import RoPE
from multihead.sizes import require_int

if TYPE_CHECKING:
    from multihead.models.texts import Tokenizer


class LanguageModel(Stack):
    """Token embedding, pre-norm blocks with RoPE on a quarter of each head, and the embedding once more as the output.

    Args:
        vocabulary: how many tokens there are.
        width: E, the width of the model.
        heads: H, the heads of each layer.
        layers: how many blocks.
        context: how many of the newest tokens a token sees, itself included.
        tokenizer: what cuts text into tokens, for `generate`; a model of bare token numbers needs none.

    >>> lm = mh.models.LanguageModel(vocabulary=50, width=32, heads=4, layers=2, context=16)
    >>> lm(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 50])
    """

    def __init__(
        self,
        vocabulary: int,
        width: int = 256,
        heads: int = 8,
        layers: int = 4,
        context: int = 256,
        tokenizer: "Tokenizer | None" = None,
    ) -> None:
        require_int("vocabulary", vocabulary, 1)
        head = require_int("width", width, 1) // require_int("heads", heads, 1)
        quarter = RoPE(base=100.0, dim=max(head // 8 * 2, 2))  # the rest can compare tokens at any distance
        super().__init__(width, heads, layers, rope=quarter)
        self.settings = {
            "vocabulary": vocabulary, "width": width, "heads": heads, "layers": layers, "context": context,
        }  # fmt: skip
        self.context, self.tokenizer = context, tokenizer
        self.mask = Causal(window=require_int("context", context, 1))
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)  # logits of about 1
        if layers > 1:
            induction.start(self.layers[0].attention, self.layers[1].attention)

    def embed(self, items: Tensor) -> Tensor:
        return self.embedding(items) * (0.5 * self.embedding.embedding_dim**0.5)  # at 1 they would drown what heads add

    def forward(self, tokens: Tensor, caches: Sequence[Cache] | None = None, mask: Given = "own") -> Tensor:
        """For each token, the logits of the one that follows: (B, N) integers → (B, N, vocabulary)."""
        x = self.contextualise(tokens, caches, mask)
        return linear(x, self.embedding.weight, None, modules_watched())

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean of −ln p of each token of (B, N) but the first."""
        return cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def new_caches(self, batch: int = 1) -> list[Cache]:
        """A sliding cache for each layer."""
        return [block.attention.new_cache(batch=batch, window=self.context) for block in self.layers]

    def continuations(
        self,
        tokens: Sequence[int],
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        cached: bool = True,
    ) -> Iterator[int]:
        """Token after token, without an end. `cached=False` reads everything again for each: slow, the same tokens."""
        vocabulary, said = self.embedding.num_embeddings, list(tokens)
        wrong = [token for token in said if not 0 <= token < vocabulary]
        if not said or wrong:
            raise ValueError(f"tokens={wrong or said}: expected at least one, each of 0…{vocabulary - 1}")
        sampling.check(temperature, top_k, top_p)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        caches = self.new_caches() if cached else None
        new = said
        while True:
            with torch.inference_mode():
                logits = self(torch.tensor([new], device=self.embedding.weight.device), caches)[0, -1]
            token = sampling.choose(logits, temperature, top_k, top_p, generator)
            yield token
            said.append(token)
            new = [token] if cached else said

    def generate(
        self,
        text: str,
        tokens: int = 50,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> str:
        """What the model writes after `text`.

        Args:
            text: the beginning.
            tokens: how many to write, at most: the end of a document ends it too.
            temperature: 0 always takes the likeliest token; 1 draws them as likely as the model holds them.
            top_k: draw only from the so many likeliest.
            top_p: draw only from the likeliest that together have this probability.
            seed: the same text for the same seed; torch's own generator unless given.
            stop: end before the first of these.

        >>> lm = mh.models.load("lm")
        >>> lm.generate("The people of the United", tokens=1, temperature=0)
        ' States'
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give LanguageModel(tokenizer=…), or use continuations()")
        require_int("tokens", tokens, 0)
        stops = [stop] if isinstance(stop, str) else list(stop)
        if "" in stops:
            raise ValueError(f"stop={stop!r}: expected texts that are not empty")
        begun, written = self.tokenizer.begin(text), ""
        new: list[int] = []
        following = self.continuations(begun, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        for token in islice(following, tokens):
            if token == self.tokenizer.end:
                break
            new.append(token)
            written = self.tokenizer.decode(new)
            found = [at for at in map(written.find, stops) if at >= 0]
            if found:
                return written[: min(found)]
        return written
