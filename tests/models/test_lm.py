"""The language model: generation with the cache and without, sampling, the window, and what it refuses."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import multihead as mh
from multihead.models import LanguageModel, recipes, texts
from multihead.models.sampling import choose


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return mh.models.load("lm")


@pytest.fixture
def tiny() -> LanguageModel:
    """Exact, so that a rounding never decides between two tokens; its text is longer than its context."""
    model = LanguageModel(vocabulary=53, width=24, heads=3, layers=2, context=11).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)  # untrained, it would say its last token over and over
    return model


def first(n: int, tokens) -> list[int]:
    return [token for _, token in zip(range(n), tokens)]


SAMPLING = [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "temperature": 0.7, "top_k": 5}, {"seed": 2, "top_p": 0.6}]


@pytest.mark.parametrize("options", SAMPLING, ids=str)
def test_cache_changes_no_token(tiny: LanguageModel, options: dict) -> None:
    start = [3, 1, 4, 1, 5]
    cached = first(60, tiny.continuations(start, **options))
    assert cached == first(60, tiny.continuations(start, **options, cached=False))
    assert len(set(cached)) > 1


def test_cache_changes_no_token_of_the_trained_model(lm: LanguageModel) -> None:
    start = lm.tokenizer.begin("The President of the United States")
    assert first(40, lm.continuations(start, temperature=0)) == first(
        40, lm.continuations(start, temperature=0, cached=False)
    )


def test_a_long_prompt_slides_through_the_window(tiny: LanguageModel) -> None:
    start = torch.randint(53, (47,)).tolist()
    assert first(20, tiny.continuations(start, temperature=0)) == first(
        20, tiny.continuations(start, temperature=0, cached=False)
    )
    changed = [(start[0] + 1) % 53, *start[1:]]  # two layers reach back two windows
    assert torch.equal(tiny(torch.tensor([start]))[0, -1], tiny(torch.tensor([changed]))[0, -1])
    near = [*start[:-11], (start[-11] + 1) % 53, *start[-10:]]
    assert not torch.equal(tiny(torch.tensor([start]))[0, -1], tiny(torch.tensor([near]))[0, -1])


def test_two_thousand_tokens_cost_the_same_each_and_take_the_memory_computed() -> None:
    layers, heads, width, context = 2, 4, 32, 64
    model = LanguageModel(61, width, heads, layers, context).eval()
    kept: list[list] = []
    new_caches = model.new_caches
    model.new_caches = lambda batch=1: kept.append(new_caches(batch)) or kept[-1]
    asked: list[tuple[int, int]] = []  # queries and keys of each call of attention
    for layer in model.modules():
        if isinstance(layer, mh.MultiHeadAttention):
            layer.attend = lambda q, k, v, *a, **o: (
                asked.append((q.shape[2], k.shape[2])) or mh.attend(q, k, v, *a, **o)
            )
    writing = model.continuations([1], seed=0)
    for _ in range(2000):
        next(writing)
    [caches] = kept
    keys_and_values = 2 * layers * (2 * context) * width * 4  # float32, twice the window
    assert sum(cache.nbytes for cache in caches) == keys_and_values
    assert [int(cache.length) for cache in caches] == [2000] * layers
    assert len(asked) == 2000 * layers
    assert all(queries == 1 and keys <= 2 * context for queries, keys in asked)


def test_the_same_seed_writes_the_same(lm: LanguageModel) -> None:
    written = lm.generate("My fellow citizens", tokens=12, seed=3)
    assert written == lm.generate("My fellow citizens", tokens=12, seed=3)
    assert len({lm.generate("My fellow citizens", tokens=12, seed=seed) for seed in range(4)}) > 1
    torch.manual_seed(0)
    unseeded = lm.generate("My fellow citizens", tokens=12)
    torch.manual_seed(0)
    assert lm.generate("My fellow citizens", tokens=12) == unseeded


def test_stop_ends_before_it(lm: LanguageModel) -> None:
    whole = lm.generate("The United States", tokens=30, temperature=0)
    letter = whole[len(whole) // 2]
    assert lm.generate("The United States", tokens=30, temperature=0, stop=letter) == whole[: whole.index(letter)]
    assert (
        lm.generate("The United States", tokens=30, temperature=0, stop=["#", letter]) == whole[: whole.index(letter)]
    )
    assert lm.generate("The United States", tokens=0) == ""


def test_end_of_a_document_ends_the_text(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter([7, 8, lm.tokenizer.end, 9])
    monkeypatch.setattr(lm, "continuations", lambda *_, **__: tokens)
    assert lm.generate("Well", tokens=10) == lm.tokenizer.decode([7, 8])


def test_choices_have_the_probabilities_asked_for() -> None:
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    draws = 4000

    def frequencies(**options: object) -> torch.Tensor:
        given = {"temperature": 1.0, "top_k": None, "top_p": None, "generator": torch.Generator().manual_seed(0)}
        chosen = [choose(p.log(), **(given | options)) for _ in range(draws)]
        return torch.bincount(torch.tensor(chosen), minlength=4) / draws

    close = 4 * (0.25 / draws) ** 0.5  # four standard errors
    for options, expected in (
        ({}, p),
        ({"temperature": 0.5}, p**2 / (p**2).sum()),
        ({"top_k": 2}, torch.tensor([0, 4 / 7, 0, 3 / 7])),
        ({"top_p": 0.69}, torch.tensor([0, 4 / 7, 0, 3 / 7])),
        ({"top_p": 0.71}, torch.tensor([0, 4 / 9, 2 / 9, 3 / 9])),
        ({"top_p": 1e-9}, torch.tensor([0.0, 1, 0, 0])),
        ({"temperature": 0.0}, torch.tensor([0.0, 1, 0, 0])),
        ({"temperature": 1e-320}, torch.tensor([0.0, 1, 0, 0])),
    ):
        assert (frequencies(**options) - expected).abs().max() < close, options


def test_choice_of_the_likeliest_takes_the_first_of_equals() -> None:
    assert choose(torch.zeros(5), 0.0, None, None, None) == 0
    assert choose(torch.zeros(5), 1.0, 1, None, torch.Generator()) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.generate(""), "text='' is empty: expected at least one word"),
        (lambda lm: lm.generate(" \n"), "is empty"),
        (lambda lm: lm.generate("x", tokens=-1), "tokens=-1: expected at least 0"),
        (lambda lm: lm.generate("x", temperature=-1), "temperature=-1: expected a number of at least 0"),
        (lambda lm: lm.generate("x", temperature=float("nan")), "temperature=nan"),
        (lambda lm: lm.generate("x", top_k=0), "top_k=0: expected at least 1"),
        (lambda lm: lm.generate("x", top_p=1.5), "top_p=1.5: expected a probability above 0, at most 1"),
        (lambda lm: lm.generate("x", stop=""), "stop='': expected texts that are not empty"),
        (lambda lm: next(lm.continuations([])), "expected at least one, each of 0…"),
        (lambda lm: next(lm.continuations([1, 10**6])), "tokens=\\[1000000\\]"),
        (lambda lm: lm.trace(torch.tensor([[1]]), layer=99), "layer=99: the model has layers 0…"),
        (lambda lm: LanguageModel(50).generate("x"), "has no tokenizer"),
        (lambda lm: LanguageModel(50, width=30, heads=4), "heads=4 does not divide E=30"),
        (lambda lm: LanguageModel(0), "vocabulary=0"),
        (lambda lm: LanguageModel(50, layers=0), "layers=0"),
        (lambda lm: LanguageModel(50, context=0), "context=0"),
    ],
)
def test_refuses_in_words(lm: LanguageModel, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(lm)


def test_text_longer_than_the_context_is_read_and_continued(lm: LanguageModel) -> None:
    long = "We hold these truths to be self-evident. " * 200
    assert len(lm.tokenizer.encode(long)) > 4 * lm.context
    assert isinstance(lm.generate(long, tokens=3, seed=0), str)


def test_the_cache_reads_a_document_as_one_call_does(tiny: LanguageModel) -> None:
    tokens = torch.randint(53, (1, 40))
    caches = tiny.new_caches()
    in_parts = torch.cat([tiny(part, caches) for part in tokens.split(7, dim=1)], dim=1)
    torch.testing.assert_close(in_parts, tiny(tokens))


def test_bits_per_byte_is_the_same_in_any_chunks(lm: LanguageModel) -> None:
    documents = ["Call me Ishmael. " * 20, "Thank you, God bless you — and good night."]
    whole = recipes.bits_per_byte(lm, documents, chunk=10**6)
    assert recipes.bits_per_byte(lm, documents, chunk=17) == pytest.approx(whole, rel=1e-5)
    tokens = torch.tensor([lm.tokenizer.begin(documents[1])])
    nats = float(lm.loss(tokens).detach()) * (tokens.shape[1] - 1)
    alone = recipes.bits_per_byte(lm, documents[1:])
    assert alone == pytest.approx(nats / torch.log(torch.tensor(2.0)).item() / len(documents[1].encode()), rel=1e-5)


def test_any_text_survives_the_tokenizer(lm: LanguageModel) -> None:
    for text in ("I love pepperoni pizza", "déjà vu ☃ 漢字 \x00\t\n", texts.END, " leading", "𝔘𝔫𝔦"):
        assert lm.tokenizer.decode(lm.tokenizer.encode(text)) == text
    assert lm.tokenizer.end not in lm.tokenizer.encode(texts.END)
    assert "".join(lm.tokenizer.pieces("I love pepperoni pizza")) == "I love pepperoni pizza"


def test_one_head_starts_by_looking_back_and_one_with_a_hint_of_induction() -> None:
    torch.manual_seed(0)
    model = LanguageModel(4096, context=256, layers=2)
    before, after = recipes.head_scores(model)
    assert before[0, 0] > 0.8
    before[0, 0] = 0
    assert before.max() < 0.1
    assert 0.1 < after[1, 0] < 0.3
    after[1, 0] = 0
    assert after.max() < 0.05
    LanguageModel(61, width=64, heads=4, layers=1)  # one layer has nothing to start


def test_the_induction_head_is_what_copies(lm: LanguageModel) -> None:
    said = torch.randint(1, lm.tokenizer.size, (8, 100), generator=torch.Generator().manual_seed(1)).repeat(1, 2)

    @torch.inference_mode()
    def surprise() -> float:
        return float(cross_entropy(lm(said[:, :-1])[:, 100:].flatten(0, 1), said[:, 101:].flatten()))

    after = recipes.head_scores(lm)[1]
    layer, head = divmod(int(after.argmax()), after.shape[1])
    as_it_is = surprise()
    with mh.ablate(lm.layers[layer].attention, heads=[head]):
        without = surprise()
    assert as_it_is < 2
    assert without > 6


def test_a_step_is_the_same_on_every_backend() -> None:
    losses, gradients = {}, {}
    for backend in ("native", "sdpa", "reference"):
        torch.manual_seed(0)
        model = LanguageModel(61, 48, 4, 2, context=32)
        with mh.backend(backend):
            loss = model.loss(torch.arange(33)[None] * 7 % 61)
            loss.backward()
        losses[backend] = float(loss.detach())
        gradients[backend] = model.embedding.weight.grad
    for backend in ("native", "sdpa"):
        assert losses[backend] == pytest.approx(losses["reference"], rel=1e-6)
        torch.testing.assert_close(gradients[backend], gradients["reference"], rtol=1e-4, atol=1e-6)


def test_another_mask_in_every_layer() -> None:
    model = mh.models.load("lm")
    tokens = torch.tensor([model.tokenizer.begin("to be or not to be")])
    own, none, short = (model.trace(tokens, 1, mask=mask)["weights"] for mask in ("own", None, mh.Causal(window=2)))
    assert torch.equal(own, model.trace(tokens, 1)["weights"])
    assert bool((none[:, 0, 1:] > 0).all())
    assert int((short[0] > 0).sum(-1).max()) == 2
    assert torch.allclose(model.look(tokens, None)[1].weights()[0], none, atol=1e-6)
    with torch.inference_mode():
        assert torch.equal(model(tokens), model(tokens, mask=mh.Causal(window=model.context)))
        assert not torch.allclose(model(tokens), model(tokens, mask=None), atol=1e-2)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_trace_after_a_cache_is_the_last_row_and_leaves_the_layer_above_alone(layer: int) -> None:
    model = mh.models.load("lm")
    tokens = torch.tensor([model.tokenizer.begin("to be or not to be")])
    whole, caches = model.trace(tokens, layer), model.new_caches()
    with torch.inference_mode():
        model(tokens[:, :-1], caches)
        alone = model.trace(tokens[:, -1:], layer, caches=caches)
    assert torch.allclose(alone["weights"][0, :, 0], whole["weights"][:, -1], atol=1e-5)
    assert torch.allclose(alone["output"][0, 0], whole["output"][-1], atol=1e-4)
    lengths = [int(cache.used) for cache in caches]
    N = tokens.shape[1]
    assert lengths == [N if below < layer else N - 1 for below in range(2)]


def test_a_tokens_piece() -> None:
    tokenizer = mh.models.load("lm").tokenizer
    assert [tokenizer.piece(token) for token in tokenizer.encode(" love")] == ["Ġlove"]
    assert tokenizer.piece(10**6) is None
