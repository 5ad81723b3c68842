"""Contenders of the generation cases: a layer's step by hand, and Hugging Face models sped up or as they are."""

import copy

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

import multihead as mh
from multihead.bench import oracle
from multihead.bench.cases import BY_HAND, BY_HAND_COMPILED, HF_COMPILED, HF_EAGER, HF_SDPA, HF_STATIC
from multihead.bench.generation import SIZES
from multihead.bench.measure import Local
from multihead.bench.ours import NAME

THETA = 10000.0


def step_tensors(case, seed=0):
    """x, the four matrices, and the cached keys (already turned) and values."""
    generator = torch.Generator().manual_seed(seed)
    kv = case.G * case.D
    shapes = {"q": (case.E, case.E), "k": (kv, case.E), "v": (kv, case.E), "o": (case.E, case.E)}
    given = {f"w_{n}": torch.randn(shape, generator=generator) * case.E**-0.5 for n, shape in shapes.items()}
    given["x"] = torch.randn(case.B, case.N, case.E, generator=generator)
    given |= {n: torch.randn(case.B, case.G, case.cached, case.D, generator=generator) for n in ("k", "v")}
    return {name: t.to(case.type) for name, t in given.items()}


def by_hand(case, given, dtype):
    """A step as an expert writes it: tables of cosines and sines, a cache with room, torch's fused attention."""
    w = {n: given[f"w_{n}"].to(dtype) for n in "qkvo"}
    x, B, N, H, G, D = given["x"].to(dtype), case.B, case.N, case.H, case.G, case.D
    k, v = (torch.nn.functional.pad(given[n].to(dtype), (0, 0, 0, N)) for n in ("k", "v"))  # room for the new
    at = torch.tensor(case.lengths)[:, None] + torch.arange(N)  # (B, N)
    wide = torch.promote_types(dtype, torch.float32)  # angles are rounded, too, as transformers rounds them
    turns = at[..., None].to(wide) * (1 / THETA ** (torch.arange(0, D, 2, dtype=wide) / D))  # (B, N, D/2)
    cos, sin = (torch.cat((t, t), -1)[:, None].to(dtype) for t in (turns.cos(), turns.sin()))  # (B, 1, N, D)
    row = torch.arange(B)[:, None]
    mask = (torch.arange(case.cached + N) <= at[..., None])[:, None] if case.ragged else None
    causal = N > 1 and not case.cached  # where torch means the same by it

    def turn(t):
        return t * cos + torch.cat((-t[..., D // 2 :], t[..., : D // 2]), -1) * sin

    def run():
        q = turn(linear(x, w["q"]).view(B, N, H, D).transpose(1, 2))
        keys = turn(linear(x, w["k"]).view(B, N, G, D).transpose(1, 2))
        values = linear(x, w["v"]).view(B, N, G, D)
        if case.ragged:
            k[row, :, at], v[row, :, at] = keys.transpose(1, 2), values
        else:
            k[:, :, case.cached :], v[:, :, case.cached :] = keys, values.transpose(1, 2)
        heads = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return linear(heads.transpose(1, 2).reshape(B, N, H * D), w["o"])

    return run


class StepProblem:
    def __init__(self, case, threads, seed=0):
        self.case, self.given = case, step_tensors(case, seed)
        with torch.no_grad():
            self.exact, plain = (by_hand(case, self.given, t)() for t in (torch.float64, case.type))
        self.bound = oracle.bound_of(self.exact, plain)

    def ours(self):
        case, given = self.case, self.given
        layer = mh.MultiHeadAttention(case.E, heads=case.H, kv_heads=case.G, bias=False, rope=True, dtype=case.type)
        layer.load_state_dict({f"{n}_proj.weight": given[f"w_{n}"] for n in "qkvo"})
        cache = layer.eval().new_cache(batch=case.B, capacity=case.cached + case.N)  # room, as by hand
        lengths = torch.tensor(case.lengths) if case.ragged else None
        with torch.inference_mode():
            cache.append(given["k"], given["v"], lengths)
        mark, mask, x = cache.mark(), mh.Causal(), given["x"]

        def run():
            y = layer(x, mask=mask, cache=cache)
            cache.back_to(mark)
            return y

        return Local(NAME, run)

    def peer(self, name):
        run = by_hand(self.case, self.given, self.case.type)
        return Local(name, {BY_HAND: run, BY_HAND_COMPILED: torch.compile(run)}[name])


def build(case, seed=0):
    """The model, in the case's dtype, and its inputs."""
    import transformers

    kind, vocabulary, E, F, layers, H, G = SIZES[case.size]
    torch.manual_seed(seed)
    sizes = {"hidden_size": E, "num_hidden_layers": layers, "num_attention_heads": H, "intermediate_size": F}
    text = {"vocab_size": vocabulary, "max_position_embeddings": max(512, case.N + case.cached + 1)}
    ids = {"input_ids": torch.randint(vocabulary or 1, (1, case.N))}
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.type)
    try:
        if kind == "ViT":
            model = transformers.ViTModel(transformers.ViTConfig(**sizes))
            return model.eval(), {"pixel_values": torch.randn(1, 3, 224, 224)}
        if kind == "BERT":
            return transformers.BertModel(transformers.BertConfig(**sizes, **text)).eval(), ids
        if kind == "Whisper":
            parts = {f"{part}_{n}": v for part in ("encoder", "decoder") for n, v in
                     (("layers", layers), ("attention_heads", H), ("ffn_dim", F))}  # fmt: skip
            model = transformers.WhisperModel(
                transformers.WhisperConfig(vocab_size=vocabulary, d_model=E, pad_token_id=0, **parts)
            )
            return model.eval(), {"input_features": torch.randn(1, 80, 3000), "decoder_input_ids": ids["input_ids"]}
        config = getattr(transformers, f"{kind}Config")(
            **sizes, **text, num_key_value_heads=G, tie_word_embeddings=True
        )
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval(), ids
    finally:
        torch.set_default_dtype(before)


def shared_copy(model):
    """Modules of its own over the same weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def contender(case, model, inputs, name):
    """A call of the model as transformers runs it under that name, or sped up."""
    import transformers

    model = shared_copy(model)
    if name == NAME:
        mh.hf.speed_up(model)
    else:
        model.set_attn_implementation("eager" if name == HF_EAGER else "sdpa")
    if not case.generates:
        return Local(name, lambda: model(**inputs), unpack=lambda out: out.last_hidden_state)
    static = name in (HF_STATIC, HF_COMPILED)
    length = case.N + case.cached

    def new_cache():
        if static:
            return transformers.StaticCache(config=model.config, max_cache_len=length)
        return mh.hf.cache(model) if name == NAME else transformers.DynamicCache(config=model.config)

    forward = torch.compile(model) if name == HF_COMPILED else model
    cache = new_cache()
    if case.cached:
        prompt = torch.randint(model.config.vocab_size, (1, case.cached), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            model(prompt, past_key_values=cache, logits_to_keep=1)

    def run():
        past = cache if case.cached else new_cache()
        logits = forward(**inputs, past_key_values=past, logits_to_keep=1).logits
        if case.cached and static:  # go back to where this call began
            for layer in past.layers:
                layer.cumulative_length.fill_(case.cached)
        elif case.cached:
            past.crop(-case.N)
        return logits

    return Local(name, run)


class WholeProblem:
    def __init__(self, case, threads, seed=0):
        self.case = case
        self.model, self.inputs = build(case, seed)
        exact = torch.float64 if case.dtype == "fp32" else torch.float32
        self.exact, plain = self._answer(exact).double(), self._answer(case.type)
        # Layers multiply a rounding, by chance more on one side: see assert_as_exact_as_eager in tests/test_hf.py.
        self.bound = oracle.bound_of(self.exact, plain) * oracle.PEER_ALLOWANCE

    def _answer(self, dtype):
        inputs = {n: t.to(dtype) if t.dtype.is_floating_point else t for n, t in self.inputs.items()}
        model = self.model if dtype is self.case.type else copy.deepcopy(self.model).to(dtype)
        return contender(self.case, model, inputs, HF_SDPA).result()

    def ours(self):
        return contender(self.case, self.model, self.inputs, NAME)

    def peer(self, name):
        return contender(self.case, self.model, self.inputs, name)
